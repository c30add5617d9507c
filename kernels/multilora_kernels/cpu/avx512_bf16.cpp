// Linears of bfloat16 weights and of activations rounded to bfloat16, by the dot products of AVX512_BF16.
//
// A pair of bfloat16 is as wide as a float. So this is the linear over floats (linear_kernels.h) with pairs in place of
// floats, half as many of them, and a product of pairs in place of one of floats: both products are added to the sum, the
// upper one first, each with a rounding to float32. Numbers below the normal ones count as zero. Codes become such pairs
// (code_pairs.h), which are exact and never below the normal numbers.
//
// Source of the instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS,
// VPERMW.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "storage.h"
#include "target.h"
#include "work.h"

MULTILORA_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")

#include "code_pairs.h"
#include "linear_kernels.h"
#include "x86_vectors.h"

namespace multilora {
namespace {

constexpr int64_t kPair = 2;

struct Pairs : X86Vectors<Pairs, 64> {
  static constexpr int kLinearRows = 8;

  static inline F broadcast(float value) { return _mm512_set1_ps(value); }
  static inline F fma(F a, F b, F c) { return _mm512_dpbf16_ps(c, __m512bh(a), __m512bh(b)); }
  static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  // a * b + c, and c - a * b, of floats
  static inline F add_product(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F subtract_product(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline F load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static inline F load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static inline F load(const int8_t* p) { return from_int8(load_16(p)); }
  static inline __m128i load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static inline F from_int8(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
  // As Float16: less by kFloat8Scale. No such number is below the normal ones of bfloat16.
  static inline F from_float8(__m128i codes) {
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(static_cast<short>(0xbfff))));
  }
  // The nearest bfloat16 of first, then those of second.
  static inline F rounded(F first, F second) { return F(_mm512_cvtne2ps_pbh(second, first)); }
  static inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static inline void store_first(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
};

void multiply(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  LinearTask pairs = task;
  pairs.in_features = pairs.x_stride = task.in_features / kPair;
  pairs.x = static_cast<const float*>(task.x_parts);
  linear<Pairs, float>(pairs, panel_begin, panel_end);
}

// Codes of 4 bits, 8 inputs of an output in a word. A shift of its halves leaves the codes of inputs i and i + 4 lowest in
// them, and a shuffle looks at the lower five bits of an index only, of which the fifth picks one of two equal tables.
struct Int4Pairs {
  static constexpr bool kHasZeros = true;
  static constexpr float kScale = 1;
  static constexpr int64_t kStepBytes = Pairs::kWidth * sizeof(uint32_t);

  // Of an output's inputs I and I + 4 of a step, in all lanes.
  template <int I>
  static inline Pairs::F pairs(const char* step, int column) {
    const __m512i words = _mm512_loadu_si512(step + column * kStepBytes);
    return Pairs::F(_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * I), numbers()));
  }

 private:
  static inline __m512i numbers() {
    const __m512 from_zero = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return __m512i(_mm512_cvtne2ps_pbh(from_zero, from_zero));
  }
};

// Codes of 8 bits, two neighbouring inputs of an output side by side.
template <Pairs::F (*to_floats)(__m128i codes)>
struct BytePairs {
  static constexpr int64_t kPairBytes = Pairs::kWidth * kPair, kStepBytes = kStepPairs * kPairBytes;

  // Of an output's inputs 2 I and 2 I + 1 of a step.
  template <int I>
  static inline Pairs::F pairs(const char* step, int column) {
    const char* codes = step + (I * kPanelVectors + column) * kPairBytes;
    return Pairs::rounded(to_floats(Pairs::load_16(codes)), to_floats(Pairs::load_16(codes + Pairs::kWidth)));
  }
};

struct Int8Pairs : BytePairs<Pairs::from_int8> {
  static constexpr bool kHasZeros = true;
  static constexpr float kScale = 1;
};

struct Float8Pairs : BytePairs<Pairs::from_float8> {
  static constexpr bool kHasZeros = false;
  static constexpr float kScale = kFloat8Scale;
};

// The order of the activations of kCodeStep inputs.
enum class Order { by_input, for_int4 };

// Rounds rows to bfloat16, each with zeros up to a multiple of Unit.
template <int64_t Unit, Order kOrder>
void round(const SplitTask& task, int64_t unit_begin, int64_t unit_end) {
  const int64_t steps = (task.in_features + kMatrixInputs - 1) / kMatrixInputs;
  const int64_t row_size = (task.in_features + Unit - 1) / Unit * Unit;
  const __m512i in_turn = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16, 15, 11, 14, 10, 13, 9,
                                           12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
  const auto first_lanes = [](int64_t n) { return n == kMatrixInputs ? ~__mmask32(0) : (__mmask32(1) << n) - 1; };
  for (int64_t unit = unit_begin; unit < unit_end; ++unit) {
    const int64_t first_row = unit / steps * kMatrixRows, first = unit % steps * kMatrixInputs;
    const int64_t end_row = std::min(first_row + kMatrixRows, task.rows);
    const __mmask32 exist = first_lanes(std::min(kMatrixInputs, task.in_features - first));
    const __mmask32 stored = first_lanes(std::min(kMatrixInputs, row_size - first));
    for (int64_t row = first_row; row < end_row; ++row) {
      const float* x = task.x + row * task.x_stride + first;
      const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(exist), x);
      const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(exist >> Pairs::kWidth), x + Pairs::kWidth);
      __m512i rounded = __m512i(_mm512_cvtne2ps_pbh(high, low));
      if constexpr (kOrder == Order::for_int4) {
        rounded = _mm512_permutexvar_epi16(in_turn, rounded);
      }
      _mm512_mask_storeu_epi16(static_cast<uint16_t*>(task.parts) + row * row_size + first, stored, rounded);
    }
  }
}

// Adds up the rounded activations of each group.
void add_up(const GroupSumTask& task, int64_t row_begin, int64_t row_end) {
  const int64_t pairs = steps_of(task.in_features) * kStepPairs;
  const int64_t groups = (task.in_features + task.group_size - 1) / task.group_size;
  const int64_t group_pairs = groups == 1 ? pairs : task.group_size / kPair;
  const Pairs::F ones = Pairs::F(_mm512_set1_epi16(0x3f80));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = static_cast<const float*>(task.x_parts) + row * pairs;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t end = std::min((group + 1) * group_pairs, pairs);
      Pairs::F sum = Pairs::zero();
      for (int64_t i = group * group_pairs; i < end; i += Pairs::kWidth) {
        const int n = static_cast<int>(std::min<int64_t>(Pairs::kWidth, end - i));
        sum = Pairs::fma(Pairs::load_first(x + i, n), ones, sum);
      }
      task.sums[row * groups + group] = _mm512_reduce_add_ps(sum);
    }
  }
}

// Whether a processor with AVX-512 has the dot products.
bool is_available() {
  constexpr unsigned kFeatures = 7, kDotProducts = 1 << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kFeatures, 1, &a, &b, &c, &d) && (a & kDotProducts);
}

constexpr PairUnit kRounding = {kPair, sizeof(uint16_t), round<kPair, Order::by_input>, multiply};

template <class Codes, Order kOrder>
constexpr PairUnit kOfCodes = {kCodeStep, sizeof(uint16_t), round<kCodeStep, kOrder>, code_pair_linear<Pairs, Codes>};

constexpr CodeUnits kCodeUnits = {kOfCodes<Int4Pairs, Order::for_int4>, kOfCodes<Int8Pairs, Order::by_input>,
                                  kOfCodes<Float8Pairs, Order::by_input>, add_up};

}  // namespace

const PairUnits kAvx512BFloat16 = {"avx512_bf16", is_available, nullptr, &kRounding, &kCodeUnits};

}  // namespace multilora

MULTILORA_TARGET_END

#endif
