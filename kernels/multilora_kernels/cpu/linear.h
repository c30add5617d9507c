// The operators over packed weights, which Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "work.h"

namespace multilora {

// One product with packed weights, to be computed in parts by several threads.
struct PackedLinear {
  at::Tensor x, y;  // x as it can be read; y is new, and not filled before its outputs are run
  at::Tensor x_parts;  // for a matrix unit
  LinearTask task;
  LinearKernel kernel;
  int64_t weight_size, panel_width;
  int64_t output_cost;  // of each output, in multiply-adds
  int64_t parts_size = 0;  // bytes of an activation's parts

  // Refuses panels and x that do not fit.
  PackedLinear(const at::Tensor& x, const at::Tensor& panels, int64_t out_features);

  // The outputs [first, last), both multiples of the panel width or out_features.
  void run(int64_t first, int64_t last) const {
    const auto panel = [&](int64_t output) { return (output + panel_width - 1) / panel_width; };
    kernel(task, panel(first), panel(last));
  }
  const void* weights_from(int64_t output) const;
  // Rows in which threads take a prompt.
  int64_t rows_of_piece() const;
  // Of the same product at most so many rows, from a multiple of kMatrixRows on.
  LinearTask rows_from(int64_t first, int64_t most) const;

 private:
  void split_rows(const MatrixUnit& unit);
};

// What a linear adds to its outputs: float32 [out_features], or null for nothing.
class Bias {
 public:
  Bias(const at::Tensor* bias, int64_t out_features);

  // To the outputs [begin, end) of all rows.
  void add_to(const LinearTask& task, int64_t begin, int64_t end) const {
    for (int64_t r = 0; values_ && r < task.rows; ++r) {
      float* row = task.y + r * task.y_stride;
      for (int64_t n = begin; n < end; ++n) {
        row[n] += values_[n];
      }
    }
  }

 private:
  const float* values_ = nullptr;
};

// `packed_linear` and `packed_embedding` of linear.py. bias: null for none.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& panels, int64_t out_features, const at::Tensor* bias);
at::Tensor packed_embedding(const at::Tensor& token_ids, const at::Tensor& panels, int64_t num_embeddings);

}  // namespace multilora
