// Any processor: eight lanes that the compiler maps to the vectors that it may assume.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "storage.h"
#include "work.h"

namespace multilora {
namespace {

// A Float8 as Float16: less by kFloat8Scale.
template <class T>
inline float lane_of(T value) {
  if constexpr (std::is_same_v<T, Float8>) {
    return to_scaled_float(value);
  } else {
    return to_float(value);
  }
}

struct Plain {
  static constexpr int kWidth = 8;
  static constexpr int kShrinkRows = 1;
  static constexpr int kSingleRowRanks = 4;
  static constexpr int kExpandRows = 2;
  static constexpr int kLinearRows = 2;
  static constexpr int kScoreVectors = 1;
  static constexpr int kValueSums = 1;

  struct F {
    float lane[kWidth];
  };

  template <class Lane>
  static inline F each(const Lane& lane) {
    F result;
    for (int i = 0; i < kWidth; ++i) {
      result.lane[i] = lane(i);
    }
    return result;
  }

  static inline F zero() { return {}; }
  static inline F broadcast(float value) {
    return each([&](int) { return value; });
  }
  static inline F loaded_once(F a) { return a; }
  static inline F broadcast_once(float value) { return broadcast(value); }
  static inline F add(F a, F b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static inline F sub(F a, F b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static inline F mul(F a, F b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static inline F div(F a, F b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static inline F fma(F a, F b, F c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static inline float sum(F a) {
    return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) + ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
  }
  // Lane i is the sum of v[i].
  static inline F sums(const F v[kWidth]) {
    return each([&](int i) { return sum(v[i]); });
  }
  static inline F max(F a, F b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static inline F min(F a, F b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // Lane i is lane i ^ 1 of a.
  static inline F swap_neighbours(F a) {
    return each([&](int i) { return a.lane[i ^ 1]; });
  }
  static inline float largest(F a) { return *std::max_element(a.lane, a.lane + kWidth); }
  static inline F zero_where_less(F a, F b, F value) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? 0.0f : value.lane[i]; });
  }
  // 2^(n - 127) for the integer n in the lowest bits of a.
  static inline F low_bits_as_exponent(F a) {
    return each([&](int i) {
      uint32_t bits;
      std::memcpy(&bits, &a.lane[i], sizeof(bits));
      bits <<= 23;
      float result;
      std::memcpy(&result, &bits, sizeof(result));
      return result;
    });
  }

  template <class T>
  static inline F load(const T* p) {
    return each([&](int i) { return lane_of(p[i]); });
  }
  template <class T>
  static inline F load_first(const T* p, int n) {
    return each([&](int i) { return i < n ? lane_of(p[i]) : 0.0f; });
  }
  // The first codes of eight pairs, and the second ones.
  static inline void load_pairs(const Int4Codes* p, F& low, F& high) {
    low = each([&](int i) { return static_cast<int8_t>(p[i].pair << 4) / 16; });
    high = each([&](int i) { return static_cast<int8_t>(p[i].pair & 0xf0) / 16; });
  }
  struct Words {
    uint32_t lane[kWidth];
  };

  static inline Words load_words(const void* p) {
    Words words;
    std::memcpy(words.lane, p, sizeof(words.lane));
    return words;
  }
  // The I-th four bits of each word, as two's complement.
  template <int I>
  static inline F nibble(Words words) {
    return each([&](int i) { return static_cast<float>(static_cast<int32_t>(words.lane[i] << (28 - 4 * I)) >> 28); });
  }
  static inline void store(float* p, F a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
  static inline void store_first(float* p, F a, int n) { std::memcpy(p, a.lane, n * sizeof(float)); }

  // Lane i of out[c] is row i, column c.
  template <int Columns, class T>
  static inline void transpose(const T* p, int64_t stride, F* out) {
    transpose_part(p, stride, kWidth, Columns, out);
  }

  template <class T>
  static inline void transpose_part(const T* p, int64_t stride, int rows, int columns, F* out) {
    for (int c = 0; c < columns; ++c) {
      out[c] = each([&](int i) { return i < rows ? lane_of(p[i * stride + c]) : 0.0f; });
    }
  }
};

}  // namespace

const Capability kPlain = capability_of<Plain>("default");

}  // namespace multilora
