// All kernels of one vector type.
#pragma once

#include "attention.h"
#include "decode.h"
#include "linear_kernels.h"
#include "quantized_kernels.h"
#include "elementwise_kernels.h"
#include "sampling.h"
#include "storage.h"
#include "lora_code_kernels.h"
#include "lora_kernels.h"
#include "work.h"

namespace multilora {
namespace {

template <class Vec, class T>
constexpr Kernels kernels_for() {
  return {shrink<Vec, T>, expand<Vec, T>, linear<Vec, T>, {attend<Vec, T>, decode<Vec, T>}};
}

template <class Vec>
constexpr Capability capability_of(const char* name) {
  return {name,
          kPanelVectors * Vec::kWidth,
          add_rms_norm<Vec>,
          add_layer_norm<Vec>,
          activate_mul<Vec, Silu>,
          activate_mul<Vec, GeluTanh>,
          activate<Vec, GeluTanh>,
          activate<Vec, Gelu>,
          clamped_gate_mul<Vec>,
          rotate<Vec>,
          sample<Vec>,
          most_probable<Vec>,
          kernels_for<Vec, float>(),
          kernels_for<Vec, BFloat16>(),
          kernels_for<Vec, Float16>(),
          {shrink<Vec, int8_t>, expand_codes<Vec, int8_t>},
          {shrink_blocks<Vec>, expand_codes<Vec, Int4Codes>},
          {shrink<Vec, Float8>, expand_codes<Vec, Float8>},
          {attend<Vec, int8_t>, decode<Vec, int8_t>},
          {attend<Vec, Float8>, decode<Vec, Float8>},
          quantized_kernels<Vec>()};
}

}  // namespace
}  // namespace multilora
