// The operators' arguments as structs, and those operators that Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "panels.h"

namespace multilora {

// LoRATables of tables.py.
struct Tables {
  const at::Tensor &arena, &rank, &a_offset, &b_offset, &magnitude_offset;
  int64_t max_rank;
};

// LoRASegments of segments.py.
struct Segments {
  const at::Tensor &permutation, &chunk_start, &chunk_length, &chunk_lora_index;
};

// `lora_apply` of apply.py.
void apply(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
           const Tables& tables, const Segments& segments);

// `lora_linear` of lora_linear.py and `quantized_lora_linear` of quantized.py. bias: null for none.
at::Tensor lora_linear(const at::Tensor& x, const Panels& panels, int64_t first_slice, at::IntArrayRef slice_sizes,
                       const Tables& tables, const Segments& segments, const at::Tensor* bias);

}  // namespace multilora
