// AVX-512 (F, BW, VL): sixteen lanes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "storage.h"
#include "target.h"
#include "work.h"

MULTILORA_TARGET("avx512f,avx512bw,avx512vl,avx2,fma,f16c")

#include "kernels.h"

namespace multilora {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kShrinkRows = 4;
  static constexpr int kSingleRowRanks = 1;
  static constexpr int kExpandRows = 4;
  static constexpr int kLinearRows = 8;
  static constexpr int kCodeTiles = 2;
  static constexpr int kScoreVectors = 4;
  static constexpr int kValueSums = 16;

  static inline F zero() { return _mm512_setzero_ps(); }
  static inline F broadcast(float value) { return _mm512_set1_ps(value); }
  // Once into a register: compilers would rather load the value again for every product.
  static inline F broadcast_once(float value) {
    F lanes = _mm512_set1_ps(value);
    asm("" : "+v"(lanes));
    return lanes;
  }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline float sum(F a) { return _mm512_reduce_add_ps(a); }
  // Lane i is the sum of v[i].
  static inline F sums(const F v[kWidth]) {
    F quad[4];
    for (int i = 0; i < 4; ++i) {
      const F* of = v + 4 * i;
      const F low = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
      const F high = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
      quad[i] = _mm512_add_ps(unpack_low_pairs(low, high), unpack_high_pairs(low, high));
    }
    return add_quarters(add_quarters(quad[0], quad[1]), add_quarters(quad[2], quad[3]));
  }
  static inline F unpack_low_pairs(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static inline F unpack_high_pairs(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  // Of the eight quarters of a and b, each with its neighbour.
  static inline F add_quarters(F a, F b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)), _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
  }
  static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
  static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
  // Lane i is lane i ^ 1 of a.
  static inline F swap_neighbours(F a) { return _mm512_permute_ps(a, _MM_SHUFFLE(2, 3, 0, 1)); }
  static inline float largest(F a) { return _mm512_reduce_max_ps(a); }
  static inline F zero_where_less(F a, F b, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), value);
  }
  // 2^(n - 127) for the integer n in the lowest bits of a.
  static inline F low_bits_as_exponent(F a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
  }

  static inline F from_bfloat16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline F load(const BFloat16* p) { return from_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static inline F load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

  static inline F load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // As Float16: less by kFloat8Scale.
  static inline F load(const Float8* p) {
    const __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(static_cast<short>(0xbfff))));
  }
  static inline __m512i load_words(const void* p) { return _mm512_loadu_si512(p); }
  template <int N>
  static inline __m512i rotate_left(__m512i words) {
    return _mm512_rol_epi32(words, N);
  }
  // 2^(23 - Bit) plus the four bits of each word from Bit on.
  template <int Bit>
  static inline F nibble_above(__m512i words) {
    constexpr int kAndOr = 0xea;
    const __m512i nibble = _mm512_set1_epi32(15 << Bit), exponent = _mm512_set1_epi32((127 + 23 - Bit) << 23);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words, nibble, exponent, kAndOr));
  }

  static inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static inline F load_first(const BFloat16* p, int n) { return from_bfloat16(_mm256_maskz_loadu_epi16(first(n), p)); }
  static inline F load_first(const Float16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
  static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static inline void store_first(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }

  // Eight 32-bit columns of sixteen rows: lane i of out[c] is row i, column c. `row(i)` loads the 32 bytes of row i.
  template <class Row>
  static inline void transpose_32bit(const Row& row, __m512i out[8]) {
    __m512i in[8], pair[8], quad[8];
    for (int i = 0; i < 8; ++i) {
      const int low = i + (i & 4);
      in[i] = _mm512_inserti64x4(_mm512_castsi256_si512(row(low)), row(low + 4), 1);
    }
    for (int i = 0; i < 8; i += 2) {
      pair[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
      pair[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quad[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
      quad[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
      quad[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
      quad[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
      out[c] = _mm512_shuffle_i32x4(quad[c], quad[c + 4], _MM_SHUFFLE(2, 0, 2, 0));
      out[c + 4] = _mm512_shuffle_i32x4(quad[c], quad[c + 4], _MM_SHUFFLE(3, 1, 3, 1));
    }
  }

  static inline F column_of(__m512i bits, int, float) { return _mm512_castsi512_ps(bits); }
  static inline F column_of(__m512i bits, int half, BFloat16) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(half ? _mm512_and_si512(bits, upper) : _mm512_slli_epi32(bits, 16));
  }
  static inline F column_of(__m512i bits, int half, Float16) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half ? _mm512_srli_epi32(bits, 16) : bits));
  }

  static inline __m256i load_part(const float* p, __mmask16 mask) {
    return _mm256_maskz_loadu_epi32(static_cast<__mmask8>(mask), p);
  }
  template <class Half>
  static inline __m256i load_part(const Half* p, __mmask16 mask) {
    return _mm256_maskz_loadu_epi16(mask, p);
  }

  // 32 bytes of every row: two neighbouring 16-bit columns travel as one 32-bit column.
  template <class T, class Row>
  static inline void transpose_32_bytes(const Row& row, F* out) {
    constexpr int kPerLane = 4 / sizeof(T);
    __m512i bits[8];
    transpose_32bit(row, bits);
    for (int c = 0; c < 8; ++c) {
      for (int half = 0; half < kPerLane; ++half) {
        out[c * kPerLane + half] = column_of(bits[c], half, T{});
      }
    }
  }

  template <int Columns, class T>
  static inline void transpose(const T* p, int64_t stride, F* out) {
    constexpr int kColumns = std::min(Columns, int(32 / sizeof(T)));
    for (int j = 0; j < Columns; j += kColumns) {
      transpose_32_bytes<T>([&](int i) { return load_columns<kColumns>(p + i * stride + j); }, out + j);
    }
  }

  template <int Columns, class T>
  static inline __m256i load_columns(const T* p) {
    if constexpr (Columns * sizeof(T) == 32) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    } else {
      return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
  }

  template <class T>
  static inline void transpose_part(const T* p, int64_t stride, int rows, int columns, F* out) {
    constexpr int kColumns = 32 / sizeof(T);
    for (int j = 0; j < columns; j += kColumns) {
      const __mmask16 mask = first(std::min(columns - j, kColumns));
      transpose_32_bytes<T>([&](int i) { return load_part(p + i * stride + j, i < rows ? mask : __mmask16(0)); }, out + j);
    }
  }
};

}  // namespace

const Capability kAvx512 = capability_of<Avx512>("avx512");

}  // namespace multilora

MULTILORA_TARGET_END

#endif
