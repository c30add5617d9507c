// The instruction set that serves this process, and its kernels.
#pragma once

#include "tensor.h"
#include "work.h"

namespace multilora {

// The widest instruction set of this processor, or the narrower one that MULTILORA_CPU_CAPABILITY names.
const Capability& capability();

// The unit that multiplies weights of a storage type and of so many inputs by pairs, with float32 activations as they are; null
// where vectors multiply the weights.
const PairUnit* pair_unit_for(DType dtype, int64_t in_features);

// The unit for activations that are rounded to bfloat16; null where there is none.
const PairUnit* rounding_unit_for(DType dtype, int64_t in_features);

// The unit for codes of a storage type in groups, and activations that are rounded to bfloat16; null where there is none.
const PairUnit* code_unit_for(DType codes, int64_t group_size, int64_t in_features);

// The unit for codes of a storage type in groups, and activations as integers of digits; null where there is none. may_round:
// activations, as to bfloat16: then it takes fewer digits.
const DigitUnit* digit_unit_for(DType codes, int64_t group_size, int64_t in_features, bool may_round);

// Its kernels for weights of a storage type: float32, bfloat16 or float16.
const Kernels& kernels_of(DType dtype);

// Its kernels for a KV cache of a type: one of these three, or codes of 8 bits (int8, float8_e4m3fn).
const AttentionKernels& attention_kernels_of(DType dtype);

// The same where queries and weights may be rounded to bfloat16.
const AttentionKernels& rounding_attention_kernels_of(DType dtype, int64_t head_dim);

// Its kernels for adapters in an arena of a type: one of these three, or codes of 8 bits (int8) or 4 (uint8).
LoraKernels lora_kernels_of(DType dtype);

}  // namespace multilora
