// AVX2 with FMA and F16C: eight lanes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "storage.h"
#include "target.h"
#include "work.h"

MULTILORA_TARGET("avx2,fma,f16c")

#include "code_digits.h"
#include "kernels.h"
#include "x86_vectors.h"

namespace multilora {
namespace {

struct Avx2 : X86Vectors<Avx2, 32> {
  static constexpr int kShrinkRows = 2;
  static constexpr int kSingleRowRanks = 4;
  static constexpr int kExpandRows = 4;
  static constexpr int kLinearRows = 4;
  static constexpr int kScoreVectors = 2;
  static constexpr int kValueSums = 12;

  static inline F broadcast(float value) { return _mm256_set1_ps(value); }
  static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static inline float sum(F a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  // Lane i is the sum of v[i].
  static inline F sums(const F v[kWidth]) {
    const F low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const F high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
  }
  static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
  static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
  // Lane i is lane i ^ 1 of a.
  static inline F swap_neighbours(F a) { return _mm256_permute_ps(a, _MM_SHUFFLE(2, 3, 0, 1)); }
  static inline float largest(F a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static inline F zero_where_less(F a, F b, F value) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), value); }

  static inline F load(const float* p) { return _mm256_loadu_ps(p); }
  static inline F load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static inline F load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

  // The first codes of eight pairs, and the second ones.
  static inline void load_pairs(const Int4Codes* p, F& low, F& high) {
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    low = nibble<0>(pairs);
    high = nibble<1>(pairs);
  }
  static inline F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // As Float16: less by kFloat8Scale.
  static inline F load(const Float8* p) {
    const __m128i bits = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(bits, 7), _mm_set1_epi16(static_cast<short>(0xbfff))));
  }
  static inline __m256i load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  // The I-th four bits of each word, as two's complement.
  template <int I>
  static inline F nibble(__m256i words) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 28 - 4 * I), 28));
  }

  template <class T>
  static inline F load_first(const T* p, int n) {
    if (n == kWidth) {
      return load(p);
    }
    T copy[kWidth] = {};
    std::memcpy(copy, p, n * sizeof(T));
    return load(copy);
  }
  static inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static inline void store_first(float* p, F a, int n) {
    if (n == kWidth) {
      _mm256_storeu_ps(p, a);
      return;
    }
    float copy[kWidth];
    _mm256_storeu_ps(copy, a);
    std::memcpy(p, copy, n * sizeof(float));
  }

  template <class Row>
  static inline __m256i load_rows(const Row& row, int i) {
    return row(i);
  }
  static inline Bits unpack_low_32bit(Bits a, Bits b) { return Bits(_mm256_unpacklo_epi32(__m256i(a), __m256i(b))); }
  static inline Bits unpack_high_32bit(Bits a, Bits b) { return Bits(_mm256_unpackhi_epi32(__m256i(a), __m256i(b))); }
  static inline Bits unpack_low_64bit(Bits a, Bits b) { return Bits(_mm256_unpacklo_epi64(__m256i(a), __m256i(b))); }
  static inline Bits unpack_high_64bit(Bits a, Bits b) { return Bits(_mm256_unpackhi_epi64(__m256i(a), __m256i(b))); }
  static inline Bits join_low(Bits a, Bits b) { return Bits(_mm256_permute2x128_si256(__m256i(a), __m256i(b), 0x20)); }
  static inline Bits join_high(Bits a, Bits b) { return Bits(_mm256_permute2x128_si256(__m256i(a), __m256i(b), 0x31)); }
  static inline F column_of_float16(Bits bits, int half) {
    const __m256i value = __m256i(half ? bits >> 16 : bits & 0xffff);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(value, value), _MM_SHUFFLE(3, 1, 2, 0));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  }

  template <class T>
  static inline void transpose_part(const T* p, int64_t stride, int rows, int columns, F* out) {
    constexpr int kColumns = kRowBytes / sizeof(T);
    for (int j = 0; j < columns; j += kColumns) {
      const size_t bytes = std::min(columns - j, kColumns) * sizeof(T);
      transpose_rows<T>([&](int i) { return i < rows ? load_bytes(p + i * stride + j, bytes) : __m256i{}; }, out + j);
    }
  }

  static inline __m256i load_bytes(const void* p, size_t bytes) {
    __m256i copy{};
    std::memcpy(&copy, p, bytes);
    return copy;
  }
};

// With products of bytes, neighbouring pairs of which are added to sums of 16 bits, in which a span fits; and of words, pairs of
// which are added to sums of 32 bits.
struct Avx2Digits : Avx2 {
  typedef __m256i I;
  typedef SplitBySteps Split;
  static constexpr int kDigitSums = 4;  // of each column: the digits of some rows
  static constexpr int64_t kMostSpan = kLeastSpan;

  static inline F subtract_product(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  // Of the even inputs of words, or the odd ones.
  template <int Half>
  static inline I nibbles(const char* p) {
    const I words = _mm256_xor_si256(load_words(p), _mm256_set1_epi8(static_cast<char>(0x88)));
    return _mm256_and_si256(Half ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(0x0f));
  }
  // Four bytes to all lanes, once into a register, as broadcast_once.
  static inline I broadcast_bytes(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, sizeof(bytes));
    I lanes = _mm256_set1_epi32(bytes);
    asm("" : "+x"(lanes));
    return lanes;
  }
  static inline I bytes_as_words(const char* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // In the order of these calls: compilers would add products to each other first, and have too few registers for that.
  static inline I kept_in_order(I sum) {
    asm("" : "+x"(sum));
    return sum;
  }
  static inline I add_byte_products(I codes, I digits, I sum) {
    return kept_in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, digits)));
  }
  static inline I add_word_products(I codes, I words, I sum) {
    return kept_in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(codes, words)));
  }
  static inline F to_float(I sum) { return _mm256_cvtepi32_ps(sum); }
  // In a span of kLeastSpan inputs all digits' products with codes of 4 bits fit 32 bits.
  template <uint32_t kSurplus, int kDigits>
  static inline F total_of_bytes(const I (&sums)[kDigits], const SpanNumbers& numbers) {
    static_assert(kSurplus == 8);
    const I ones = _mm256_set1_epi16(1);
    I all = _mm256_add_epi32(_mm256_madd_epi16(sums[0], ones), _mm256_madd_epi16(sums[1], _mm256_set1_epi16(256)));
    if constexpr (kDigits == 3) {
      all = _mm256_add_epi32(all, _mm256_slli_epi32(_mm256_madd_epi16(sums[2], ones), 16));
    }
    const uint32_t surplus = kSurplus * (numbers.low_sum + (numbers.high_sum << 16));
    return to_float(_mm256_sub_epi32(all, _mm256_set1_epi32(static_cast<int32_t>(surplus))));
  }
};

}  // namespace

const DigitUnits kAvx2Digits = {digit_unit<Avx2Digits, NibbleDigits<Avx2Digits, 3>>(),
                                digit_unit<Avx2Digits, NibbleDigits<Avx2Digits, 2>>(),
                                {},
                                digit_unit<Avx2Digits, ByteWords<Avx2Digits>>()};
const Capability kAvx2 = capability_of<Avx2>("avx2");

}  // namespace multilora

MULTILORA_TARGET_END

#endif
