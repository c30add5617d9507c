// Loops that only load, or only multiply, on one core: compiled for the processor at hand and called by machine_limits.py.
// Each multiplication feeds an accumulator of its own until enough are under way to hide an instruction's latency.

#include <cstddef>
#include <cstdint>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
constexpr int kAccumulators = 12;

typedef float Floats __attribute__((vector_size(kBytes)));
constexpr int kLanes = kBytes / sizeof(float);

// Accumulators start with different numbers: the compiler would keep one of several that are always equal.
template <typename Vector, typename Multiply>
double sum_after(int64_t rounds, const Multiply& multiply) {
  Vector accumulators[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) accumulators[i] = Vector{} + static_cast<std::decay_t<decltype(Vector{}[0])>>(i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kAccumulators; ++i) accumulators[i] = multiply(accumulators[i]);
  }
  double sum = 0;
  for (int i = 0; i < kAccumulators; ++i)
    for (int lane = 0; lane < kLanes; ++lane) sum += accumulators[i][lane];
  return sum;
}

// The sum of floats, line by line, after each a chain of multiplications that the next line's chain waits for.
template <int Multiplications>
double load_in_time(const float* values, int64_t count) {
  Floats sums = {};
  uint64_t chain = 1;
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    sums += *reinterpret_cast<const Floats*>(values + i);
#pragma GCC unroll 8
    for (int j = 0; j < Multiplications; ++j) {
      chain *= 3;
      asm volatile("" : "+r"(chain));
    }
  }
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return sum;
}

}  // namespace

extern "C" {

// Operations of one round of a loop below, 0 where the processor lacks the instruction. A multiplication with its
// addition counts as two.
int64_t operations_float32() { return 2 * kAccumulators * kLanes; }
#if defined(__AVX512BF16__)
int64_t operations_bfloat16() { return 4 * kAccumulators * kLanes; }
#else
int64_t operations_bfloat16() { return 0; }
#endif

double multiply_float32(int64_t rounds, float factor) {
  const Floats factors = Floats{} + factor, addends = Floats{} + 1.0f;
  return sum_after<Floats>(rounds, [&](Floats a) { return a * factors + addends; });
}

double multiply_bfloat16([[maybe_unused]] int64_t rounds, [[maybe_unused]] float factor) {
#if defined(__AVX512BF16__)
  const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_set1_ps(factor), _mm512_set1_ps(factor));
  return sum_after<Floats>(rounds, [&](Floats a) { return (Floats)_mm512_dpbf16_ps((__m512)a, pairs, pairs); });
#else
  return 0;
#endif
}

// The sum of `count` floats, of which the last count % (8 * kLanes) are left out.
double load(const float* values, int64_t count) {
  Floats sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] += *reinterpret_cast<const Floats*>(values + i + j * kLanes);
  }
  Floats all = sums[0];
  for (int j = 1; j < 8; ++j) all += sums[j];
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += all[lane];
  return sum;
}

// As `load`, at most a line in the time of so many multiplications, 2 or 4. A core that asks for lines as soon as it can seems to
// keep the prefetcher of its L2 cache from running ahead: two cores of a Xeon with AMX read 27.5 GB/s so, and 31.5 with 4
// multiplications for each line, which the core does about in the time in which a line comes.
double load_slowly(const float* values, int64_t count, int64_t multiplications) {
  return multiplications == 2 ? load_in_time<2>(values, count) : load_in_time<4>(values, count);
}
}
