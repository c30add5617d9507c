// The operators over packed weights.
#pragma once

#include <cstdint>

#include "panels.h"
#include "tensor.h"
#include "work.h"

namespace multilora {

// A vector that a linear adds to its outputs: float32 [out_features], or undefined for none.
class Bias {
 public:
  Bias() = default;
  explicit Bias(const float* values) : values_(values) {}
  // The vector must outlive it.
  Bias(const Tensor& bias, int64_t out_features);

  // Adds it to the outputs [begin, end) of some rows of y.
  void add_to(float* y, int64_t stride, int64_t rows, int64_t begin, int64_t end) const {
    for (int64_t r = 0; values_ && r < rows; ++r, y += stride) {
      for (int64_t n = begin; n < end; ++n) {
        y[n] += values_[n];
      }
    }
  }
  // Adds it to all of y, by several threads.
  void add_to(const Tensor& y) const;

 private:
  const float* values_ = nullptr;
};

// What multiplies panels of one layout, and the parts of activations that it takes.
class PanelKernel {
 public:
  // Refuses panels that this processor does not multiply.
  explicit PanelKernel(const Panels& panels);

  LinearKernel kernel() const { return kernel_; }
  bool is_of_pairs() const { return pairs_; }
  // Bytes of the parts of a row; 0 where activations are multiplied as they are.
  int64_t row_parts() const { return row_parts_; }
  // Floats of GroupSumTask::sums of a row; 0 where there are none.
  int64_t row_sums() const { return row_sums_; }
  // LinearTask::span
  int64_t span() const { return span_; }
  // Of taking an activation apart, in multiply-adds.
  int64_t split_cost() const;
  // The units of work that taking so many rows apart is. The first rows are the first units, by whole kMatrixRows.
  int64_t split_units(int64_t rows) const;
  // Takes rows apart, where there are parts. task: with its x_parts, of all rows.
  void split(const LinearTask& task, int64_t unit_begin, int64_t unit_end) const;
  // Adds up the groups of rows that are taken apart, where there are sums.
  void add_up(const LinearTask& task, int64_t row_begin, int64_t row_end) const;

 private:
  LinearKernel kernel_;
  const PairUnit* pairs_ = nullptr;
  const DigitUnit* digits_ = nullptr;
  int64_t in_features_, row_parts_ = 0, row_sums_ = 0, span_ = 0, group_size_ = 0;
};

// A product with packed weights; nothing but these weights is known.
LinearTask task_of(const Panels& panels, int64_t out_features);

// One product with packed weights. Several threads compute it in pieces; a piece has some outputs of some rows.
class PackedLinear {
 public:
  // Refuses panels and x that do not fit.
  PackedLinear(const Tensor& x, const Panels& panels, int64_t out_features);

  const Tensor& x() const { return x_; }  // in a layout that the kernels read
  const Tensor& y() const { return y_; }  // new, and filled only when the pieces run
  int64_t num_threads() const { return threads_; }  // the number that the product is worth
  int64_t num_pieces() const { return row_pieces_ * panel_pieces_; }
  // The pieces begin .. end - 1.
  void run(int64_t begin, int64_t end, const Bias& bias) const;
  int64_t num_panels() const { return num_panels_; }
  int64_t panel_width() const { return panel_width_; }
  // Computes some panels for all rows.
  void run_panels(int64_t begin, int64_t end) const { kernel_(task_, begin, end); }

 private:
  void split_rows(const PanelKernel& kernel);
  int64_t rows_of_piece(int64_t most) const;
  LinearTask rows_from(int64_t first) const;

  Tensor x_, y_;
  Tensor x_parts_, x_sums_;  // for a PairUnit, or a DigitUnit
  LinearTask task_;
  LinearKernel kernel_;
  int64_t num_panels_, panel_width_, row_parts_ = 0;  // bytes of a row's parts
  int64_t threads_, piece_rows_, row_pieces_, panel_pieces_;
};

// `packed_linear` and `packed_embedding` of linear.py, and `quantized_linear` of quantized.py. bias: undefined for none.
Tensor packed_linear(const Tensor& x, const Panels& panels, int64_t out_features, const Tensor& bias);
Tensor packed_embedding(const Tensor& token_ids, const Tensor& panels, int64_t num_embeddings);

}  // namespace multilora
