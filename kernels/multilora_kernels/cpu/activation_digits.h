// Activations as integers, for products with codes (code_digits.h, code_tiles.h).
//
// The neighbouring inputs of a span are x[i] = unit * X[i], where unit is a power of two and X[i] an integer, rounded to the
// nearest: the error is at most half a unit, 1.004 * 2^-15 of the span's largest magnitude, or 1.004 * 2^-23 with three digits.
// X[i] is d[i, 0] + 256 d[i, 1] + 65536 d[i, 2], with two or three digits between -128 and 127, or one digit of 16 bits.
//
// Every kMatrixRows rows, and the rows left over, are a block: the digits, [tiles, rows, digits, inputs of a tile], and then the
// SpanNumbers, [spans, rows].
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "quantized_kernels.h"
#include "work.h"

namespace multilora {
namespace {

constexpr int64_t kMostSpan = 4 * kLeastSpan;
// Inputs whose digits lie side by side.
constexpr int64_t kTileInputs = 64;
constexpr int64_t kTileSteps = kTileInputs / kCodeStep;
static_assert(kTileInputs % kLeastSpan == 0 && kLeastSpan % kCodeStep == 0);

// The order of the inputs of a step: words of codes of 4 bits have the even ones below the odd ones, 0, 2, 4, 6, 1, 3, 5, 7.
enum class DigitOrder { by_input, even_first };

struct SpanNumbers {
  float unit;  // not a number where an activation is none, or is infinite
  float sum;   // of X
  // Of the lower two digits, the second one times 256, and of the third one. Unsigned: those of what is no number may overflow.
  uint32_t low_sum, high_sum;
};

// The blocks of digits of some rows.
template <int kDigits>
struct DigitLayout {
  // Bytes of a digit of one input, and of the digits of a tile of a row.
  static constexpr int64_t kDigitBytes = kDigits == 1 ? sizeof(int16_t) : 1;
  static constexpr int64_t kTileBytes = kTileInputs * kDigitBytes * kDigits;

  int64_t tiles, spans;

  constexpr DigitLayout(int64_t in_features, int64_t span)
      : tiles((in_features + kTileInputs - 1) / kTileInputs), spans((in_features + span - 1) / span) {}
  // Of a block, divided by its rows.
  constexpr int64_t row_bytes() const {
    const int64_t numbers = spans * static_cast<int64_t>(sizeof(SpanNumbers));
    return tiles * kTileBytes + (numbers + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
  // From the begin of a block of so many rows.
  constexpr int64_t numbers_offset(int64_t rows) const { return tiles * rows * kTileBytes; }
};

inline float power_of_two(uint32_t biased_exponent) { return std::bit_cast<float>(biased_exponent << 23); }

inline int32_t sum_of(__m256i a) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(half);
}

// The integers of some inputs: their sum, and that of their third digits. Unsigned as in SpanNumbers.
struct DigitSums {
  uint32_t all, high;
};

// The place of a step's first digit. digits: of the first tile, tile_stride bytes before those of the next.
template <int kDigits>
inline char* digits_of_step(char* digits, int64_t step, int64_t tile_stride) {
  return digits + step / kTileSteps * tile_stride + step % kTileSteps * kCodeStep * DigitLayout<kDigits>::kDigitBytes;
}

// Splits inputs by vectors of eight of them, a step.
struct SplitBySteps {
  // The largest magnitude of the inputs of some steps, as the bits of a float: these are in the order of the magnitudes, and
  // those that are no numbers are largest.
  static inline uint32_t largest_magnitude(const float* x, int64_t steps) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < steps * kCodeStep; i += kCodeStep) {
      const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
  }

  // Stores the digits of x * factor, rounded to integers, of the steps from first_step on.
  template <int kDigits, DigitOrder kOrder>
  static inline DigitSums store(const float* x, int64_t steps, float factor, char* digits, int64_t first_step,
                                int64_t tile_stride) {
    __m256i sums = _mm256_setzero_si256(), high_sums = _mm256_setzero_si256();
    for (int64_t step = 0; step < steps; ++step) {
      const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + step * kCodeStep), _mm256_set1_ps(factor));
      const __m256i integers = _mm256_cvtps_epi32(scaled);
      sums = _mm256_add_epi32(sums, integers);
      if constexpr (kDigits == 3) {
        high_sums = _mm256_add_epi32(high_sums, _mm256_srai_epi32(_mm256_add_epi32(integers, _mm256_set1_epi32(0x8080)), 16));
      }
      store_step<kDigits, kOrder>(integers, digits_of_step<kDigits>(digits, first_step + step, tile_stride));
    }
    return {static_cast<uint32_t>(sum_of(sums)), static_cast<uint32_t>(sum_of(high_sums))};
  }

 private:
  // Stores the digits of one step of integers, digit by digit.
  template <int kDigits, DigitOrder kOrder>
  static inline void store_step(__m256i integers, char* digits) {
    const auto halves = [](__m256i a) { return std::pair(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); };
    if constexpr (kDigits == 1) {
      static_assert(kOrder == DigitOrder::by_input);
      const auto [low, high] = halves(integers);
      return _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), _mm_packs_epi32(low, high));
    }
    // A digit's rest goes to the next one: byte j of an integer is its digit j.
    const auto carried = [&](int from) { return _mm256_add_epi32(integers, _mm256_set1_epi32(from)); };
    const auto byte = [](__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi32(mask)); };
    __m256i bytes = _mm256_or_si256(byte(integers, 0xff), byte(carried(0x80), 0xff00));
    if constexpr (kDigits == 3) {
      bytes = _mm256_or_si256(bytes, byte(carried(0x8080), 0xff0000));
    }
    const auto store = [&](int digit, __m128d pair, bool is_upper) {
      auto* to = reinterpret_cast<double*>(digits + digit * kTileInputs);
      is_upper ? _mm_storeh_pd(to, pair) : _mm_storel_pd(to, pair);
    };
    constexpr bool kIsInOrder = kOrder == DigitOrder::by_input;
    const __m256i by_digit = kIsInOrder ? _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1,  //
                                                           0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1)
                                        : _mm256_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, -1, -1, -1, -1,  //
                                                           0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, -1, -1, -1, -1);
    const auto [low, high] = halves(_mm256_shuffle_epi8(bytes, by_digit));
    const __m128i first = kIsInOrder ? _mm_unpacklo_epi32(low, high) : _mm_unpacklo_epi16(low, high);
    store(0, _mm_castsi128_pd(first), false);
    store(1, _mm_castsi128_pd(first), true);
    if constexpr (kDigits == 3) {
      const __m128i last = kIsInOrder ? _mm_unpackhi_epi32(low, high) : _mm_unpackhi_epi16(low, high);
      store(2, _mm_castsi128_pd(last), false);
    }
  }
};

// Stores the digits of the first `steps` steps of a span, with one of the structs that split. digits: see digits_of_step.
template <class Split, int kDigits, DigitOrder kOrder>
inline SpanNumbers split_span(const float* x, int64_t steps, char* digits, int64_t first_step, int64_t tile_stride) {
  constexpr uint32_t kFraction = kDigits == 3 ? 22 : 14, kExponents = 255, kBias = 127;
  // The largest integer of all digits is a little less than the power of two above it.
  constexpr float kRoom = 1.004f;
  const uint32_t largest = Split::largest_magnitude(x, steps);
  const bool is_finite = largest >> 23 < kExponents;
  const float magnitude = is_finite ? std::bit_cast<float>(largest) * kRoom : 0;
  const uint32_t exponent = std::max(std::bit_cast<uint32_t>(magnitude) >> 23, kFraction + 1);
  const float factor = is_finite ? power_of_two(2 * kBias + kFraction - exponent) : 0;
  const auto [sum, high_sum] = Split::template store<kDigits, kOrder>(x, steps, factor, digits, first_step, tile_stride);
  const float unit = is_finite ? power_of_two(exponent - kFraction) : std::numeric_limits<float>::quiet_NaN();
  return {unit, static_cast<float>(static_cast<int32_t>(sum)), sum - (high_sum << 16), high_sum};
}

template <class Split, int kDigits, DigitOrder kOrder>
void split_into_digits(const DigitTask& task, int64_t row_begin, int64_t row_end) {
  const DigitLayout<kDigits> layout(task.in_features, task.span);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t first_row = row / kMatrixRows * kMatrixRows, rows = std::min(kMatrixRows, task.rows - first_row);
    const float* x = task.x + row * task.x_stride;
    char* block = static_cast<char*>(task.parts) + first_row * layout.row_bytes();
    char* digits = block + (row - first_row) * layout.kTileBytes;
    auto* numbers = reinterpret_cast<SpanNumbers*>(block + layout.numbers_offset(rows)) + (row - first_row);
    for (int64_t first = 0; first < task.in_features; first += task.span, numbers += rows) {
      const int64_t inputs = std::min(task.span, task.in_features - first), steps = steps_of(inputs);
      float last[kMostSpan];
      if (inputs < steps * kCodeStep) {
        std::fill(std::copy_n(x + first, inputs, last), last + steps * kCodeStep, 0.0f);
      }
      const float* from = inputs < steps * kCodeStep ? last : x + first;
      *numbers = split_span<Split, kDigits, kOrder>(from, steps, digits, first / kCodeStep, rows * layout.kTileBytes);
    }
  }
}

}  // namespace
}  // namespace multilora
