// Numbers that C++20 has no arithmetic for.
#pragma once

#include <bit>
#include <cstdint>

namespace multilora {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Two codes of lora_codes.h; the first is in the lower four bits, as two's complement.
struct Int4Codes {
  uint8_t pair;
};

// float8_e4m3fn
struct Float8 {
  uint8_t bits;
};

// A Float8 that is a number, read as a Float16, by moving its bits, is less by this factor: the exponents' biases are 7 and 15.
constexpr float kFloat8Scale = 256;

// By which the floats that vectors load for stored values are less than these.
template <class T>
constexpr float kLoadedScale = 1;
template <>
inline constexpr float kLoadedScale<Float8> = kFloat8Scale;

inline float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }

inline float to_float(Float16 value) {
  constexpr uint32_t kInfinity = 0x1f << 23;
  // The exponents' biases are 15 and 127. A product with a power of two leaves numbers below the normal ones exact, too.
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13, sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t number = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>((magnitude >= kInfinity ? magnitude | 0x7f800000 : number) | sign);
}

// Of a Float8 that is a number, read as a Float16.
inline float to_scaled_float(Float8 value) {
  const uint32_t sign = (value.bits & 0x80) << 8, magnitude = (value.bits & 0x7f) << 7;
  return to_float(Float16{static_cast<uint16_t>(sign | magnitude)});
}

inline float to_float(float value) { return value; }
inline float to_float(double value) { return static_cast<float>(value); }
inline float to_float(int8_t value) { return value; }

// The bits of the nearest number, of two equally near ones the even one, with so many bits of a fraction and such a bias of its
// exponents. magnitude: the bits of a float without sign, no larger than the largest such number.
template <int kFractionBits, int kBias>
uint32_t nearest_bits(uint32_t magnitude) {
  constexpr int kDropped = 23 - kFractionBits;
  constexpr uint32_t kSmallestNormal = uint32_t(127 - kBias + 1) << 23;
  if (magnitude < kSmallestNormal) {
    // Added to this number, one below the normal ones is rounded to their unit, and counts these in the lowest bits.
    constexpr uint32_t kShift = kSmallestNormal + (uint32_t(kDropped) << 23);
    return std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kShift)) - kShift;
  }
  const uint32_t rounded = magnitude + (uint32_t(1) << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
  return (rounded >> kDropped) - (uint32_t(127 - kBias) << kFractionBits);
}

// The nearest number of a type; infinity of Float16, and NaN of Float8, for larger ones than it has.
template <class T>
T nearest(float value);

template <>
inline float nearest<float>(float value) {
  return value;
}

template <>
inline double nearest<double>(float value) {
  return value;
}

template <>
inline BFloat16 nearest<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_number = value == value;
  return {static_cast<uint16_t>(is_number ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0)};
}

template <>
inline Float16 nearest<Float16>(float value) {
  constexpr uint32_t kTooLarge = uint32_t(127 + 16) << 23, kInfinity = 0x7f800000;
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t near = magnitude > kInfinity ? 0x7e00 : magnitude >= kTooLarge ? 0x7c00 : nearest_bits<10, 15>(magnitude);
  return {static_cast<uint16_t>(near | sign)};
}

template <>
inline Float8 nearest<Float8>(float value) {
  constexpr uint32_t kTooLarge = std::bit_cast<uint32_t>(480.0f);
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t near = magnitude >= kTooLarge ? 0x7f : nearest_bits<3, 7>(magnitude);
  return {static_cast<uint8_t>(near | (bits >> 24 & 0x80))};
}

}  // namespace multilora
