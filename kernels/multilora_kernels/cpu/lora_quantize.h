// Codes of adapters.
#pragma once

#include <cstdint>

#include "tensor.h"

namespace multilora {

// Bits of the codes of an arena of this type; 0 where it holds floats.
constexpr int code_bits_of(DType arena) {
  return arena == DType::int8 || arena == DType::float8_e4m3fn ? 8 : arena == DType::uint8 ? 4 : 0;
}

// `quantize_a` and `quantize_b` of adapter_quantization.py. arena: the type of an arena of such codes.
Tensor quantize_lora_a(const Tensor& a, DType arena);
Tensor quantize_lora_b(const Tensor& b, DType arena);

}  // namespace multilora
