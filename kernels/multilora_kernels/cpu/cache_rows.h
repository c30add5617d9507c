// Heads' rows in the KV cache: elements, or codes of 8 bits with their scale behind them (kv_rows.py).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lora_kernels.h"
#include "storage.h"
#include "work.h"

namespace multilora {
namespace {

template <class T>
constexpr bool kIsCode = std::is_same_v<T, int8_t> || std::is_same_v<T, Float8>;

// Whether `Vec` multiplies pairs of bfloat16, and so queries are rounded to it.
template <class Vec, class = void>
constexpr bool kTakesPairs = false;
template <class Vec>
constexpr bool kTakesPairs<Vec, std::enable_if_t<Vec::kMultipliesPairs>> = true;

// Scores are exponents of two instead of e where that saves a product.
constexpr float kLog2OfE = 1.44269504f;

// The bytes of a head's row.
template <class T>
MULTILORA_INLINE int64_t row_bytes(int64_t head_dim) {
  return head_dim * int64_t(sizeof(T)) + (kIsCode<T> ? kRowScaleBytes : 0);
}

// The scale of a row: the factor of its codes as vectors load them. It is not aligned where a head has an odd number of
// elements.
template <class T>
MULTILORA_INLINE float scale_of(const T* row, int64_t head_dim) {
  float scale;
  std::memcpy(&scale, row + head_dim, sizeof(scale));
  return scale * kLoadedScale<T>;
}

}  // namespace
}  // namespace multilora
