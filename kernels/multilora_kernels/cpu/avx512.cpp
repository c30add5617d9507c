// AVX-512 (F, BW, VL): sixteen lanes.
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

MULTILORA_TARGET("avx512f,avx512bw,avx512vl,avx2,fma,f16c")

#include "code_digits.h"
#include "code_tiles.h"
#include "kernels.h"
#include "x86_vectors.h"

namespace multilora {
namespace {

struct Avx512 : X86Vectors<Avx512, 64> {
  static constexpr int kShrinkRows = 4;
  static constexpr int kSingleRowRanks = 1;
  static constexpr int kExpandRows = 4;
  static constexpr int kLinearRows = 8;
  static constexpr int kScoreVectors = 4;
  static constexpr int kValueSums = 16;

  static inline F broadcast(float value) { return _mm512_set1_ps(value); }
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

  static inline F from_bfloat16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline F load(const BFloat16* p) { return from_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static inline F load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

  static inline F load(const int8_t* p) { return from_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static inline F load(const Float8* p) { return from_float8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static inline __m512i load_words(const void* p) { return _mm512_loadu_si512(p); }
  // The I-th four bits of each word, as two's complement. A shuffle looks at the lower four bits of an index only.
  template <int I>
  static inline F nibble(__m512i words) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * I), nibbles());
  }
  static inline F nibbles() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1); }

  static inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static inline F load_first(const BFloat16* p, int n) { return from_bfloat16(_mm256_maskz_loadu_epi16(first(n), p)); }
  static inline F load_first(const Float16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }

  // As Float16: less by kFloat8Scale.
  static inline F from_float8(__m128i codes) {
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(static_cast<short>(0xbfff))));
  }
  static inline F from_int8(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
  static inline F load_first(const Float8* p, int n) { return from_float8(_mm_maskz_loadu_epi8(first(n), p)); }
  static inline F load_first(const int8_t* p, int n) { return from_int8(_mm_maskz_loadu_epi8(first(n), p)); }
  // The first codes of sixteen pairs, and the second ones.
  static inline void load_pairs(const Int4Codes* p, F& low, F& high) {
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    low = nibble<0>(pairs);
    high = nibble<1>(pairs);
  }

  static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static inline void store_first(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }

  // Row i of the first eight, in turn with row i of the last eight.
  template <class Row>
  static inline __m512i load_rows(const Row& row, int i) {
    const int low = i + (i & 4);
    return _mm512_inserti64x4(_mm512_castsi256_si512(row(low)), row(low + 4), 1);
  }
  static inline Bits unpack_low_32bit(Bits a, Bits b) { return Bits(_mm512_unpacklo_epi32(__m512i(a), __m512i(b))); }
  static inline Bits unpack_high_32bit(Bits a, Bits b) { return Bits(_mm512_unpackhi_epi32(__m512i(a), __m512i(b))); }
  static inline Bits unpack_low_64bit(Bits a, Bits b) { return Bits(_mm512_unpacklo_epi64(__m512i(a), __m512i(b))); }
  static inline Bits unpack_high_64bit(Bits a, Bits b) { return Bits(_mm512_unpackhi_epi64(__m512i(a), __m512i(b))); }
  static inline Bits join_low(Bits a, Bits b) {
    return Bits(_mm512_shuffle_i32x4(__m512i(a), __m512i(b), _MM_SHUFFLE(2, 0, 2, 0)));
  }
  static inline Bits join_high(Bits a, Bits b) {
    return Bits(_mm512_shuffle_i32x4(__m512i(a), __m512i(b), _MM_SHUFFLE(3, 1, 3, 1)));
  }
  static inline F column_of_float16(Bits bits, int half) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(__m512i(half ? bits >> 16 : bits)));
  }

  static inline __m256i load_part(const float* p, __mmask16 mask) {
    return _mm256_maskz_loadu_epi32(static_cast<__mmask8>(mask), p);
  }
  template <class Half>
  static inline __m256i load_part(const Half* p, __mmask16 mask) {
    return _mm256_maskz_loadu_epi16(mask, p);
  }

  template <class T>
  static inline void transpose_part(const T* p, int64_t stride, int rows, int columns, F* out) {
    constexpr int kColumns = kRowBytes / sizeof(T);
    for (int j = 0; j < columns; j += kColumns) {
      const __mmask16 mask = first(std::min(columns - j, kColumns));
      transpose_rows<T>([&](int i) { return load_part(p + i * stride + j, i < rows ? mask : __mmask16(0)); }, out + j);
    }
  }
};

// With the dot products of AVX512_BF16, for kernels that multiply pairs of bfloat16 where `Avx512` multiplies floats. They are
// written in assembly, because this file is compiled for processors without them, too.
//
// Source of the instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS,
// VCVTNE2PS2BF16.
struct Avx512Pairs : Avx512 {
  static constexpr bool kMultipliesPairs = true;
  typedef __m512i Pairs;  // sixteen pairs of bfloat16

  // Lane i is sum[i] + a[2i + 1] * b[2i + 1] + a[2i] * b[2i], in this order.
  static inline F dot(Pairs a, Pairs b, F sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  // The nearest bfloat16 of first, then those of second.
  static inline Pairs rounded(F first, F second) {
    Pairs both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first), "v"(second));
    return both;
  }
  // Stores the nearest bfloat16, and gives them as floats.
  static inline F store_rounded(BFloat16* p, F a) {
    __m256i nearest;
    asm("vcvtneps2bf16 %1, %0" : "=v"(nearest) : "v"(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), nearest);
    return from_bfloat16(nearest);
  }
  // Pair i is a[i], b[i], rounded.
  static inline Pairs rounded_pairs(F a, F b) {
    const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                             20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(in_turn, rounded(a, b));
  }
  static inline F first_of(Pairs pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static inline F second_of(Pairs pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static inline Pairs load_all(const void* p) { return _mm512_loadu_si512(p); }
  static inline void store_all(void* p, Pairs pairs) { _mm512_storeu_si512(p, pairs); }
  static inline Pairs broadcast_pair(const void* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  // The first elements of a and b, then the second ones and so on, of the halves of every 128 bits.
  static inline Pairs lower_in_turn(Pairs a, Pairs b) { return _mm512_unpacklo_epi16(a, b); }
  static inline Pairs upper_in_turn(Pairs a, Pairs b) { return _mm512_unpackhi_epi16(a, b); }
  // Lanes that were put in turn by halves, in their own order again.
  static inline void put_in_order(F& lower, F& upper) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const F low = _mm512_permutex2var_ps(lower, first, upper);
    upper = _mm512_permutex2var_ps(lower, second, upper);
    lower = low;
  }
  static inline F round_up(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }

  // The same vectors, whose product is that of pairs.
  struct Products : Avx512 {
    static inline F fma(F a, F b, F c) { return dot(__m512i(a), __m512i(b), c); }
  };
};

// With the matrix unit, for attention of several queries.
struct AmxPairs : Avx512Pairs {
  static constexpr bool kMultipliesTiles = true;
};

// As SplitBySteps, two steps at a time.
struct SplitByPairsOfSteps {
  static inline uint32_t largest_magnitude(const float* x, int64_t steps) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < steps * kCodeStep; i += kPair) {
      const __mmask16 mask = Avx512::first(static_cast<int>(std::min(kPair, steps * kCodeStep - i)));
      const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, x + i));
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    return _mm512_reduce_max_epu32(largest);
  }

  // first_step: even, so that both steps of a pair lie in one tile.
  template <int kDigits, DigitOrder kOrder>
  static inline DigitSums store(const float* x, int64_t steps, float factor, char* digits, int64_t first_step,
                                int64_t tile_stride) {
    // Half of the range of each digit, which is its highest bit: an integer that is raised by it has bytes that are its digits,
    // raised as well.
    const __m512i half = _mm512_set1_epi32(kDigits == 3 ? 0x808080 : 0x8080);
    __m512i sums = _mm512_setzero_si512(), high_sums = sums;
    const int64_t pairs = steps / 2;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + pair * kPair), _mm512_set1_ps(factor)));
      const __m512i raised = _mm512_add_epi32(integers, half);
      sums = _mm512_add_epi32(sums, integers);
      if constexpr (kDigits == 3) {
        high_sums = _mm512_add_epi32(high_sums, _mm512_srli_epi32(raised, 16));
      }
      const __m512i by_digit = in_order<kOrder>(_mm512_xor_si512(raised, half));
      char* to = digits_of_step<kDigits>(digits, first_step + 2 * pair, tile_stride);
      store_digit<0>(to, by_digit);
      store_digit<1>(to, by_digit);
      if constexpr (kDigits == 3) {
        store_digit<2>(to, by_digit);
      }
    }
    DigitSums all{static_cast<uint32_t>(_mm512_reduce_add_epi32(sums)), static_cast<uint32_t>(_mm512_reduce_add_epi32(high_sums))};
    if constexpr (kDigits == 3) {
      all.high -= static_cast<uint32_t>(pairs * kPair * 0x80);
    }
    if (steps % 2 != 0) {
      const int64_t last = steps - 1;
      const auto of_last =
          SplitBySteps::store<kDigits, kOrder>(x + last * kCodeStep, 1, factor, digits, first_step + last, tile_stride);
      all.all += of_last.all;
      all.high += of_last.high;
    }
    return all;
  }

 private:
  static constexpr int64_t kPair = 2 * kCodeStep;

  template <int kDigit>
  static inline void store_digit(char* to, __m512i by_digit) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kDigit * kTileInputs), _mm512_extracti32x4_epi32(by_digit, kDigit));
  }
  // Byte j of sixteen integers as the j-th sixteen bytes.
  template <DigitOrder kOrder>
  static inline __m512i in_order(__m512i integers) {
    if constexpr (kOrder == DigitOrder::by_input) {
      const __m128i of_four = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const __m512i by_digit = _mm512_shuffle_epi8(integers, _mm512_broadcast_i32x4(of_four));
      return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), by_digit);
    } else {
      // Pairs of even inputs, then of odd ones: words, of which those of a step's two quarters go in turn.
      const __m128i of_four = _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
      const __m512i by_digit = _mm512_shuffle_epi8(integers, _mm512_broadcast_i32x4(of_four));
      const __m512i words = _mm512_set_epi16(31, 23, 30, 22, 15, 7, 14, 6, 29, 21, 28, 20, 13, 5, 12, 4, 27, 19, 26, 18, 11, 3, 10,
                                             2, 25, 17, 24, 16, 9, 1, 8, 0);
      return _mm512_permutexvar_epi16(words, by_digit);
    }
  }
};

// With products of bytes, of AVX512_VNNI, in assembly for the same reason: four neighbouring bytes are multiplied and added to a
// sum of 32 bits.
//
// Source of the instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD, VPERMB.
struct Avx512Digits : Avx512 {
  typedef __m512i I;
  typedef SplitByPairsOfSteps Split;
  static constexpr int kDigitSums = 6;  // of each column: the digits of some rows
  static constexpr int64_t kMostSpan = multilora::kMostSpan;

  static inline F subtract_product(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  // Of the even inputs of words, or the odd ones.
  template <int Half>
  static inline I nibbles(const char* p) {
    const I words = _mm512_xor_si512(load_words(p), _mm512_set1_epi8(static_cast<char>(0x88)));
    return _mm512_and_si512(Half ? _mm512_srli_epi16(words, 4) : words, _mm512_set1_epi8(0x0f));
  }
  // Four bytes to all lanes.
  static inline I broadcast_bytes(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, sizeof(bytes));
    return _mm512_set1_epi32(bytes);
  }
  static inline I without_sign(const char* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  static inline I add_byte_products(I codes, I digits, I sum) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digits));
    return sum;
  }
  template <uint32_t kSurplus, int kDigits>
  static inline F total_of_bytes(const I (&sums)[kDigits], const SpanNumbers& numbers) {
    const auto without = [](I sum, uint32_t of_digits) {
      return _mm512_sub_epi32(sum, _mm512_set1_epi32(static_cast<int32_t>(kSurplus * of_digits)));
    };
    const I low = without(_mm512_add_epi32(sums[0], _mm512_slli_epi32(sums[1], 8)), numbers.low_sum);
    if constexpr (kDigits == 3) {
      return total_of(low, without(sums[2], numbers.high_sum));
    }
    return _mm512_cvtepi32_ps(low);
  }
  // Of the sums of a digit, and those of the next digit `stride` integers behind.
  template <int kDigits>
  static inline F total_of_products(const int32_t* sums, int64_t stride) {
    const auto of_digit = [&](int digit) { return _mm512_load_si512(sums + digit * stride); };
    const I low = _mm512_add_epi32(of_digit(0), _mm512_slli_epi32(of_digit(1), 8));
    if constexpr (kDigits == 3) {
      return total_of(low, of_digit(2));
    }
    return _mm512_cvtepi32_ps(low);
  }
  // Stores the codes of 4 bits of the even inputs of words, and of the odd ones, as bytes. With a shuffle of AVX512_VBMI, which
  // every processor with tiles has: it looks at the lower six bits of an index only, of which four pick one of equal tables.
  static inline void store_nibbles(const char* p, char* even, char* odd) {
    const I words = load_words(p);
    _mm512_store_si512(even, shuffle_bytes(words, byte_nibbles()));
    _mm512_store_si512(odd, shuffle_bytes(_mm512_srli_epi16(words, 4), byte_nibbles()));
  }

 private:
  static inline F total_of(I low, I high) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536), _mm512_cvtepi32_ps(low));
  }
  static inline I shuffle_bytes(I indices, I table) {
    I bytes;
    asm("vpermb %2, %1, %0" : "=v"(bytes) : "v"(indices), "v"(table));
    return bytes;
  }
  static inline I byte_nibbles() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
  }
};

}  // namespace

const DigitUnits kAvx512Digits = {
    digit_unit<Avx512Digits, NibbleDigits<Avx512Digits, 3>>(), digit_unit<Avx512Digits, NibbleDigits<Avx512Digits, 2>>(),
    digit_unit<Avx512Digits, ByteDigits<Avx512Digits, 3>>(), digit_unit<Avx512Digits, ByteDigits<Avx512Digits, 2>>()};
const DigitUnits kAmxDigits = {
    tile_unit<Avx512Digits, NibbleDigits<Avx512Digits, 3>>(), tile_unit<Avx512Digits, NibbleDigits<Avx512Digits, 2>>(),
    tile_unit<Avx512Digits, ByteDigits<Avx512Digits, 3>>(), tile_unit<Avx512Digits, ByteDigits<Avx512Digits, 2>>()};
const Capability kAvx512 = capability_of<Avx512>("avx512");
const AttentionKernels kAvx512PairAttention = {attend<Avx512Pairs, BFloat16>, decode<Avx512Pairs, BFloat16>};
const AttentionKernels kAmxAttention = {attend<AmxPairs, BFloat16>, decode<Avx512, BFloat16>};

}  // namespace multilora

MULTILORA_TARGET_END

#endif
