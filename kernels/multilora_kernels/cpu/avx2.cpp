// AVX2 with FMA and F16C: eight lanes.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "storage.h"
#include "target.h"
#include "work.h"

MULTILORA_TARGET("avx2,fma,f16c")

#include "tiles.h"

namespace multilora {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kShrinkRows = 2;
  static constexpr int kExpandRows = 8;

  static inline F zero() { return _mm256_setzero_ps(); }
  static inline F broadcast(float value) { return _mm256_set1_ps(value); }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static inline float sum(F a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  static inline F load(const float* p) { return _mm256_loadu_ps(p); }
  static inline F load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static inline F load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

  template <class T>
  static inline F load_first(const T* p, int n) {
    T copy[kWidth] = {};
    std::memcpy(copy, p, n * sizeof(T));
    return load(copy);
  }
  static inline void store_first(float* p, F a, int n) {
    float copy[kWidth];
    _mm256_storeu_ps(copy, a);
    std::memcpy(p, copy, n * sizeof(float));
  }

  // Lane i of out[c] is row i, column c.
  static inline void transpose_vectors(const F in[8], F* out) {
    F pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
      pair[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
      pair[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
      quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
      quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
      quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
    }
    for (int c = 0; c < 4; ++c) {
      out[c] = _mm256_permute2f128_ps(quad[c], quad[c + 4], 0x20);
      out[c + 4] = _mm256_permute2f128_ps(quad[c], quad[c + 4], 0x31);
    }
  }

  template <class T>
  static inline void transpose(const T* p, int64_t stride, F* out) {
    F in[8];
    for (int i = 0; i < 8; ++i) {
      in[i] = load(p + i * stride);
    }
    transpose_vectors(in, out);
  }

  template <class T>
  static inline void transpose_part(const T* p, int64_t stride, int rows, int columns, F* out) {
    F in[8];
    for (int i = 0; i < 8; ++i) {
      in[i] = i < rows ? load_first(p + i * stride, columns) : zero();
    }
    transpose_vectors(in, out);
  }
};

}  // namespace

const Capability kAvx2 = {
    "avx2", kernels_for<Avx2, float>(), kernels_for<Avx2, BFloat16>(), kernels_for<Avx2, Float16>()};

}  // namespace multilora

MULTILORA_TARGET_END

#endif
