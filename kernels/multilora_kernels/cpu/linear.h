// The operators over packed weights, which Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "work.h"

namespace multilora {

// One product with packed weights, to be computed in parts by several threads.
struct PackedLinear {
  at::Tensor x, y;  // x as it can be read; y is new, and not filled before its outputs are run
  LinearTask task;
  LinearKernel kernel;
  int64_t weight_size, panel_width;
  int64_t output_cost;  // of each output, in multiply-adds

  // Refuses panels and x that do not fit.
  PackedLinear(const at::Tensor& x, const at::Tensor& panels, int64_t out_features);

  // The outputs [first, last), both multiples of the panel width or out_features.
  void run(int64_t first, int64_t last) const {
    const auto panel = [&](int64_t output) { return (output + panel_width - 1) / panel_width; };
    kernel(task, panel(first), panel(last));
  }
  const void* weights_from(int64_t output) const;
  // Of the same product at most so many rows.
  LinearTask rows_from(int64_t first, int64_t most) const;
};

// `packed_linear` and `packed_embedding` of linear.py.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& panels, int64_t out_features);
at::Tensor packed_embedding(const at::Tensor& token_ids, const at::Tensor& panels, int64_t num_embeddings);

}  // namespace multilora
