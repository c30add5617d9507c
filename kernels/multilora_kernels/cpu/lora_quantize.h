// Codes of adapters.
#pragma once

#include <cstdint>

#include "tensor.h"

namespace multilora {

// `quantize_a` and `quantize_b` of adapter_quantization.py.
Tensor quantize_lora_a(const Tensor& a, int64_t bits);
Tensor quantize_lora_b(const Tensor& b, int64_t bits);

}  // namespace multilora
