// The operators' arguments as structs, and the operators of adapters.
#pragma once

#include <cstdint>

#include "panels.h"
#include "tensor.h"

namespace multilora {

// LoRATables of tables.py.
struct Tables {
  Tensor arena, rank, a_offset, b_offset, magnitude_offset;
  int64_t max_rank;
};

// LoRASegments of segments.py.
struct Segments {
  Tensor permutation, chunk_start, chunk_length, chunk_lora_index;
};

// `lora_segments` of lora_segments.py, in at most `capacity` chunks, which all have a place.
Segments lora_segments(const Tensor& token_lora_mapping, int64_t max_loras, int64_t chunk_size, int64_t capacity);

// `lora_shrink` of shrink.py and `lora_expand` of expand.py.
Tensor lora_shrink(const Tensor& x, int64_t first_slice, int64_t num_slices, const Tables& tables, const Segments& segments);
void lora_expand(const Tensor& v, const Tensor& y, int64_t first_slice, Integers slice_sizes, const Tables& tables,
                 const Segments& segments);

// `lora_apply` of apply.py.
void apply(const Tensor& x, const Tensor& y, int64_t first_slice, Integers slice_sizes, const Tables& tables,
           const Segments& segments);

// `lora_linear` of lora_linear.py and `quantized_lora_linear` of quantized.py. bias: undefined for none.
Tensor lora_linear(const Tensor& x, const Panels& panels, int64_t first_slice, Integers slice_sizes, const Tables& tables,
                   const Segments& segments, const Tensor& bias);

}  // namespace multilora
