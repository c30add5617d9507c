// Activations as integers, for products with codes (code_digits.h).
//
// The kSpan neighbouring inputs of a span are x[i] = unit * X[i], where unit is a power of two and X[i] an integer, rounded to
// the nearest: the error is at most half a unit, 1.004 * 2^-15 of the span's largest magnitude, or 1.004 * 2^-23 with three
// digits. Beside codes of 4 bits X[i] is d[i, 0] + 256 d[i, 1] + 65536 d[i, 2], with two or three digits between -128 and 127.
// Beside codes of 8 bits it is one digit of 16 bits.
//
// A row is its digits, [steps, digits, inputs of a step], and then the SpanNumbers of its spans. The inputs of a step are 0, 2,
// 4, 6, 1, 3, 5, 7 where digits are bytes: so lie the codes of 4 bits of a word, the even ones below the odd ones.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "quantized_kernels.h"
#include "work.h"

namespace multilora {
namespace {

constexpr int64_t kSpanSteps = kSpan / kCodeStep;
static_assert(kSpan % kCodeStep == 0);

// Codes of 4 bits without sign are larger by it than those that are stored, so that each product is too large by so many times
// X[i].
constexpr int32_t kMiddleCode = 8;

struct SpanNumbers {
  float unit;       // not a number where an activation is none, or is infinite
  int32_t surplus;  // kMiddleCode times the sum of X
  float sum;        // of X
};

constexpr int64_t spans_of(int64_t inputs) { return (inputs + kSpan - 1) / kSpan; }

// Bytes of the digits of one input.
template <int kDigits>
constexpr int64_t kDigitBytes = kDigits == 1 ? sizeof(int16_t) : kDigits;

// Bytes of a row's digits, behind which its SpanNumbers lie.
template <int kDigits>
constexpr int64_t digits_bytes(int64_t in_features) {
  return steps_of(in_features) * kCodeStep * kDigitBytes<kDigits>;
}

template <int kDigits>
constexpr int64_t digit_row_bytes(int64_t in_features) {
  const int64_t numbers = spans_of(in_features) * static_cast<int64_t>(sizeof(SpanNumbers));
  return (digits_bytes<kDigits>(in_features) + numbers + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// The largest magnitude of a span, as the bits of a float: these are in the order of the magnitudes, and those that are no
// numbers are largest.
inline uint32_t largest_magnitude(const float* x) {
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < kSpan; i += kCodeStep) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

inline float power_of_two(uint32_t biased_exponent) { return std::bit_cast<float>(biased_exponent << 23); }

// Stores the digits of one step of integers.
template <int kDigits>
inline void store_digits(__m256i integers, char* digits) {
  if constexpr (kDigits == 1) {
    const __m128i low = _mm256_castsi256_si128(integers), high = _mm256_extracti128_si256(integers, 1);
    return _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), _mm_packs_epi32(low, high));
  }
  // A digit's rest goes to the next one: byte j of an integer is its digit j.
  const auto carried = [&](int from) { return _mm256_add_epi32(integers, _mm256_set1_epi32(from)); };
  const auto byte = [](__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi32(mask)); };
  __m256i bytes = _mm256_or_si256(byte(integers, 0xff), byte(carried(0x80), 0xff00));
  if constexpr (kDigits == 3) {
    bytes = _mm256_or_si256(bytes, byte(carried(0x8080), 0xff0000));
  }
  const __m256i by_digit = _mm256_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, -1, -1, -1, -1,  //
                                            0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, -1, -1, -1, -1);
  bytes = _mm256_shuffle_epi8(bytes, by_digit);
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), _mm_unpacklo_epi16(low, high));
  if constexpr (kDigits == 3) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(digits + 2 * kCodeStep), _mm_unpackhi_epi16(low, high));
  }
}

// Stores the digits of the first `steps` steps of a span.
template <int kDigits>
inline SpanNumbers split_span(const float* x, int64_t steps, char* digits) {
  constexpr uint32_t kFraction = kDigits == 3 ? 22 : 14, kExponents = 255, kBias = 127;
  // The largest integer of all digits is a little less than the power of two above it.
  constexpr float kRoom = 1.004f;
  const uint32_t largest = largest_magnitude(x);
  const bool is_finite = largest >> 23 < kExponents;
  const float magnitude = is_finite ? std::bit_cast<float>(largest) * kRoom : 0;
  const uint32_t exponent = std::max(std::bit_cast<uint32_t>(magnitude) >> 23, kFraction + 1);
  const __m256 factor = _mm256_set1_ps(is_finite ? power_of_two(2 * kBias + kFraction - exponent) : 0);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t step = 0; step < steps; ++step) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + step * kCodeStep), factor);
    const __m256i integers = _mm256_cvtps_epi32(scaled);
    sums = _mm256_add_epi32(sums, integers);
    store_digits<kDigits>(integers, digits + step * kCodeStep * kDigitBytes<kDigits>);
  }
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
  const int32_t sum = _mm_cvtsi128_si32(half);
  const float unit = is_finite ? power_of_two(exponent - kFraction) : std::numeric_limits<float>::quiet_NaN();
  return {unit, static_cast<int32_t>(kMiddleCode * static_cast<uint32_t>(sum)), static_cast<float>(sum)};
}

template <int kDigits>
void split_into_digits(const DigitTask& task, int64_t row_begin, int64_t row_end) {
  const int64_t stride = digit_row_bytes<kDigits>(task.in_features);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = task.x + row * task.x_stride;
    char* digits = task.rows + row * stride;
    auto* numbers = reinterpret_cast<SpanNumbers*>(digits + digits_bytes<kDigits>(task.in_features));
    for (int64_t first = 0; first < task.in_features; first += kSpan, digits += kSpan * kDigitBytes<kDigits>) {
      const int64_t inputs = std::min(kSpan, task.in_features - first);
      float last[kSpan] = {};
      if (inputs < kSpan) {
        std::copy_n(x + first, inputs, last);
      }
      *numbers++ = split_span<kDigits>(inputs < kSpan ? last : x + first, steps_of(inputs), digits);
    }
  }
}

}  // namespace
}  // namespace multilora
