// Linears of bfloat16 weights and of activations rounded to bfloat16, by the dot products of AVX512_BF16.
//
// A pair of bfloat16 is as wide as a float. So this is the linear over floats (linear_kernels.h) with pairs in place of
// floats, half as many of them, and a product of pairs in place of one of floats: both products are added to the sum, the
// upper one first, each with a rounding to float32. Numbers below the normal ones count as zero.
//
// Source of the instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "storage.h"
#include "target.h"
#include "work.h"

MULTILORA_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")

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
  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
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

// Rounds rows to bfloat16.
void round(const SplitTask& task, int64_t unit_begin, int64_t unit_end) {
  const int64_t steps = (task.in_features + kMatrixInputs - 1) / kMatrixInputs;
  for (int64_t unit = unit_begin; unit < unit_end; ++unit) {
    const int64_t first_row = unit / steps * kMatrixRows, first = unit % steps * kMatrixInputs;
    const int64_t end_row = std::min(first_row + kMatrixRows, task.rows), n = std::min(kMatrixInputs, task.in_features - first);
    const __mmask32 exist = n == kMatrixInputs ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
    for (int64_t row = first_row; row < end_row; ++row) {
      const float* x = task.x + row * task.x_stride + first;
      const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(exist), x);
      const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(exist >> Pairs::kWidth), x + Pairs::kWidth);
      uint16_t* to = static_cast<uint16_t*>(task.parts) + row * task.in_features + first;
      _mm512_mask_storeu_epi16(to, exist, __m512i(_mm512_cvtne2ps_pbh(high, low)));
    }
  }
}

// Whether a processor with AVX-512 has the dot products.
bool is_available() {
  constexpr unsigned kFeatures = 7, kDotProducts = 1 << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kFeatures, 1, &a, &b, &c, &d) && (a & kDotProducts);
}

constexpr PairUnit kRounding = {kPair, sizeof(uint16_t), round, multiply};

}  // namespace

const PairUnits kAvx512BFloat16 = {"avx512_bf16", is_available, nullptr, &kRounding};

}  // namespace multilora

MULTILORA_TARGET_END

#endif
