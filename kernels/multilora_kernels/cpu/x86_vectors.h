// The half that the vector types of AVX2 and AVX-512 share (avx2.cpp, avx512.cpp): arithmetic by the compiler's operators on
// vectors, each of which is one instruction, and transposition, which both do within quarters of 128 bits first.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "storage.h"

namespace multilora {
namespace {

// `Own` is the vector type itself, of so many bytes. For transposition it has load_rows, unpack_low_32bit and so on, join_low,
// join_high and column_of_float16.
template <class Own, int kBytes>
struct X86Vectors {
  typedef float F __attribute__((vector_size(kBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kBytes)));
  static constexpr int kWidth = kBytes / sizeof(float);

  static inline F zero() { return F{}; }
  static inline F add(F a, F b) { return a + b; }
  static inline F sub(F a, F b) { return a - b; }
  static inline F mul(F a, F b) { return a * b; }
  static inline F div(F a, F b) { return a / b; }
  // The same vector, in a register: compilers would rather load it again for every product, and processors load few a cycle.
  static inline F loaded_once(F a) {
    asm("" : "+v"(a));
    return a;
  }
  static inline F broadcast_once(float value) { return loaded_once(Own::broadcast(value)); }
  // 2^(n - 127) for the integer n in the lowest bits of a.
  static inline F low_bits_as_exponent(F a) { return F(Bits(a) << 23); }

  // Lane i of out[c] is row i, column c.
  template <int Columns, class T>
  static inline void transpose(const T* p, int64_t stride, F* out) {
    constexpr int kColumns = std::min(Columns, int(kRowBytes / sizeof(T)));
    for (int j = 0; j < Columns; j += kColumns) {
      transpose_rows<T, kColumns>([&](int i) { return load_columns<kColumns>(p + i * stride + j); }, out + j);
    }
  }

 protected:
  // Of every row, transposed at a time: eight columns of 32 bits.
  static constexpr int kRowBytes = 32;

  // The first columns of kRowBytes of each row, which is row(i). Two neighbouring columns of 16 bits travel as one of 32.
  template <class T, int Columns = kRowBytes / sizeof(T), class Row>
  static inline void transpose_rows(const Row& row, F* out) {
    constexpr int kPerLane = 4 / sizeof(T);
    Bits bits[8];
    transpose_32bit(row, bits);
    for (int c = 0; c < Columns / kPerLane; ++c) {
      for (int half = 0; half < kPerLane; ++half) {
        out[c * kPerLane + half] = column_of(bits[c], half, T{});
      }
    }
  }

 private:
  template <class Row>
  static inline void transpose_32bit(const Row& row, Bits out[8]) {
    Bits in[8], pair[8], quad[8];
    for (int i = 0; i < 8; ++i) {
      in[i] = Bits(Own::load_rows(row, i));
    }
    for (int i = 0; i < 8; i += 2) {
      pair[i] = Own::unpack_low_32bit(in[i], in[i + 1]);
      pair[i + 1] = Own::unpack_high_32bit(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quad[i] = Own::unpack_low_64bit(pair[i], pair[i + 2]);
      quad[i + 1] = Own::unpack_high_64bit(pair[i], pair[i + 2]);
      quad[i + 2] = Own::unpack_low_64bit(pair[i + 1], pair[i + 3]);
      quad[i + 3] = Own::unpack_high_64bit(pair[i + 1], pair[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
      out[c] = Own::join_low(quad[c], quad[c + 4]);
      out[c + 4] = Own::join_high(quad[c], quad[c + 4]);
    }
  }

  static inline F column_of(Bits bits, int, float) { return F(bits); }
  static inline F column_of(Bits bits, int half, BFloat16) { return F(half ? bits & 0xffff0000u : bits << 16); }
  static inline F column_of(Bits bits, int half, Float16) { return Own::column_of_float16(bits, half); }

  template <int Columns, class T>
  static inline __m256i load_columns(const T* p) {
    if constexpr (Columns * sizeof(T) == kRowBytes) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    } else {
      return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
  }
};

}  // namespace
}  // namespace multilora
