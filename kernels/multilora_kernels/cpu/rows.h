// What lies between a layer's matrix products, row by row, written once over a vector type `Vec`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "exponential.h"
#include "vectors.h"
#include "work.h"

namespace multilora {
namespace {

template <class Vec>
void add_rms_norm(const NormTask& task, int64_t row_begin, int64_t row_end) {
  using F = typename Vec::F;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t start = row * task.size;
    float *total = task.total + start, *normed = task.normed + start;
    F squares = Vec::zero();
    for_each_vector<Vec>(task.size, [&](int64_t i, auto part) {
      const F sum = Vec::add(part.load(task.x + start + i), part.load(task.update + start + i));
      part.store(total + i, sum);
      squares = Vec::fma(sum, sum, squares);
    });
    const F scale = Vec::broadcast(1.0f / std::sqrt(Vec::sum(squares) / float(task.size) + task.eps));
    for_each_vector<Vec>(task.size, [&](int64_t i, auto part) {
      part.store(normed + i, Vec::mul(Vec::mul(part.load(total + i), scale), part.load(task.weight + i)));
    });
  }
}

template <class Vec>
void silu_mul(const float* gate_up, int64_t size, float* out, int64_t row_begin, int64_t row_end) {
  using F = typename Vec::F;
  const F one = Vec::broadcast(1.0f), minus_one = Vec::broadcast(-1.0f), lowest = Vec::broadcast(-kLargestExponent);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float *gates = gate_up + 2 * row * size, *ups = gates + size;
    for_each_vector<Vec>(size, [&](int64_t i, auto part) {
      const F gate = part.load(gates + i);
      // In this order the larger of the two is NaN where the gate is.
      const F e = exponential<Vec>(Vec::mul(Vec::max(lowest, gate), minus_one));
      part.store(out + row * size + i, Vec::mul(Vec::div(gate, Vec::add(one, e)), part.load(ups + i)));
    });
  }
}

template <class Vec>
MULTILORA_INLINE void rotate_halves(const RotationTask& task, const float* x, float* out) {
  using F = typename Vec::F;
  const int64_t half = task.rotary_dim / 2;
  for_each_vector<Vec>(half, [&](int64_t i, auto part) {
    const F first = part.load(x + i), second = part.load(x + half + i);
    part.store(out + i, Vec::fma(second, part.load(task.sin + i), Vec::mul(first, part.load(task.cos + i))));
    part.store(out + half + i,
               Vec::fma(first, part.load(task.sin + half + i), Vec::mul(second, part.load(task.cos + half + i))));
  });
}

template <class Vec>
MULTILORA_INLINE void rotate_neighbours(const RotationTask& task, const float* x, float* out) {
  for_each_vector<Vec>(task.rotary_dim, [&](int64_t i, auto part) {
    const typename Vec::F values = part.load(x + i);
    const typename Vec::F turned = Vec::mul(values, part.load(task.cos + i));
    part.store(out + i, Vec::fma(Vec::swap_neighbours(values), part.load(task.sin + i), turned));
  });
}

template <class Vec>
void rotate(const RotationTask& task) {
  const int64_t left = task.head_dim - task.rotary_dim;
  for (int64_t head = 0; head < task.num_heads; ++head) {
    const float* x = task.x + head * task.head_dim;
    float* out = task.out + head * task.head_dim;
    if (task.is_interleaved) {
      rotate_neighbours<Vec>(task, x, out);
    } else {
      rotate_halves<Vec>(task, x, out);
    }
    std::copy_n(x + task.rotary_dim, left, out + task.rotary_dim);
  }
}

}  // namespace
}  // namespace multilora
