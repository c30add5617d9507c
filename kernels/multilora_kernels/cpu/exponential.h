// e^x, 2^x and tanh(x) over a vector type `Vec`.
#pragma once

#include <cstdint>

#include "lora_kernels.h"

namespace multilora {
namespace {

// The largest x that `exponential` takes: e^x and 1 + e^x are finite.
constexpr float kLargestExponent = 88.0f;

// e^x = 2^n * (1 + r + r^2 * p) for an integer n and |r| <= ln(2) / 2. The polynomial is that of Cephes' expf.
template <class Vec>
struct Exponent {
  typename Vec::F power;  // 2^n
  typename Vec::F r, p;
};

template <class Vec>
MULTILORA_INLINE Exponent<Vec> exponent_of(typename Vec::F x) {
  using F = typename Vec::F;
  // Added to a small n it leaves n + 127, the exponent of 2^n, in the lowest bits of the sum.
  constexpr float kShift = 12582912.0f + 127.0f;
  const F shifted = Vec::fma(x, Vec::broadcast(1.44269504f), Vec::broadcast(kShift));
  const F n = Vec::add(shifted, Vec::broadcast(-kShift));
  F r = Vec::fma(n, Vec::broadcast(-0.693359375f), x);
  r = Vec::fma(n, Vec::broadcast(2.12194440e-4f), r);
  F p = Vec::broadcast(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = Vec::fma(p, r, Vec::broadcast(coefficient));
  }
  return {Vec::low_bits_as_exponent(shifted), r, p};
}

// e^x for x <= kLargestExponent, zero below the normal numbers.
template <class Vec>
MULTILORA_INLINE typename Vec::F exponential(typename Vec::F x) {
  using F = typename Vec::F;
  constexpr float kLowest = -87.0f;
  const auto [power, r, p] = exponent_of<Vec>(x);
  const F rest = Vec::fma(p, Vec::mul(r, r), Vec::add(r, Vec::broadcast(1.0f)));
  return Vec::zero_where_less(x, Vec::broadcast(kLowest), Vec::mul(rest, power));
}

// tanh(x) = (e^2x - 1) / (e^2x + 1), with a relative error below 2e-7: e^2x - 1 is not taken from a rounded e^2x.
template <class Vec>
MULTILORA_INLINE typename Vec::F hyperbolic_tangent(typename Vec::F x) {
  using F = typename Vec::F;
  // Where it is 1 in float32. In this order the larger and the smaller of two are NaN where x is.
  constexpr float kLargest = 10.0f;
  const F near = Vec::min(Vec::broadcast(kLargest), Vec::max(Vec::broadcast(-kLargest), x));
  const auto [power, r, p] = exponent_of<Vec>(Vec::add(near, near));
  const F minus_one = Vec::fma(Vec::fma(p, Vec::mul(r, r), r), power, Vec::add(power, Vec::broadcast(-1.0f)));
  return Vec::div(minus_one, Vec::add(minus_one, Vec::broadcast(2.0f)));
}

// Each of `size` scores, a multiple of Vec::kWidth, becomes cap * tanh(score / cap).
template <class Vec>
void cap_all(float* scores, int64_t size, float cap) {
  const typename Vec::F caps = Vec::broadcast(cap), shares = Vec::broadcast(1.0f / cap);
  for (float* score = scores; score < scores + size; score += Vec::kWidth) {
    Vec::store(score, Vec::mul(caps, hyperbolic_tangent<Vec>(Vec::mul(Vec::load(score), shares))));
  }
}

// 2^x for x <= 0, zero below the normal numbers. Of all polynomials of its degree, this one's largest relative error, 2e-9,
// is the least.
template <class Vec>
MULTILORA_INLINE typename Vec::F power_of_two(typename Vec::F x) {
  using F = typename Vec::F;
  constexpr float kLowest = -126.0f;
  // As above.
  const F shift = Vec::broadcast(12582912.0f + 127.0f);
  const F shifted = Vec::add(x, shift);
  const F r = Vec::sub(x, Vec::sub(shifted, shift));
  F p = Vec::broadcast(1.5345810e-4f);
  for (const float coefficient : {1.3399931e-3f, 9.6184890e-3f, 5.5503288e-2f, 2.4022647e-1f, 6.9314721e-1f, 1.0f}) {
    p = Vec::fma(p, r, Vec::broadcast(coefficient));
  }
  return Vec::zero_where_less(x, Vec::broadcast(kLowest), Vec::mul(p, Vec::low_bits_as_exponent(shifted)));
}

}  // namespace
}  // namespace multilora
