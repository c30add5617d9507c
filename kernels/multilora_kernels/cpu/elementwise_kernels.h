// The operators between a layer's matrix products, row by row, written once over a vector type `Vec`.
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
void add_layer_norm(const NormTask& task, int64_t row_begin, int64_t row_end) {
  using F = typename Vec::F;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t start = row * task.size;
    float *total = task.total + start, *normed = task.normed + start;
    F sum = Vec::zero(), squares = Vec::zero();
    for_each_vector<Vec>(task.size, [&](int64_t i, auto part) {
      const F element = Vec::add(part.load(task.x + start + i), part.load(task.update + start + i));
      part.store(total + i, element);
      sum = Vec::add(sum, element);
    });
    const F mean = Vec::broadcast(Vec::sum(sum) / float(task.size));
    for_each_vector<Vec>(task.size, [&](int64_t i, auto part) {
      part.store(normed + i, Vec::sub(part.load(total + i), mean));
      const F centred = part.load(normed + i);  // zero in lanes that do not exist
      squares = Vec::fma(centred, centred, squares);
    });
    const F scale = Vec::broadcast(1.0f / std::sqrt(Vec::sum(squares) / float(task.size) + task.eps));
    for_each_vector<Vec>(task.size, [&](int64_t i, auto part) {
      const F weighted = Vec::mul(Vec::mul(part.load(normed + i), scale), part.load(task.weight + i));
      part.store(normed + i, task.bias ? Vec::add(weighted, part.load(task.bias + i)) : weighted);
    });
  }
}

// x / (1 + e^-y)
template <class Vec>
MULTILORA_INLINE typename Vec::F times_sigmoid(typename Vec::F x, typename Vec::F y) {
  using F = typename Vec::F;
  const F one = Vec::broadcast(1.0f), minus_one = Vec::broadcast(-1.0f), lowest = Vec::broadcast(-kLargestExponent);
  // In this order the larger of the two is NaN where y is.
  const F e = exponential<Vec>(Vec::mul(Vec::max(lowest, y), minus_one));
  return Vec::div(x, Vec::add(one, e));
}

struct Silu {
  template <class Vec>
  static MULTILORA_INLINE typename Vec::F of(typename Vec::F x) {
    return times_sigmoid<Vec>(x, x);
  }
};

// x * (1 + tanh(u)) / 2 for u = sqrt(2 / pi) * (x + 0.044715 * x^3), which is x * sigmoid(2 * u).
struct GeluTanh {
  template <class Vec>
  static MULTILORA_INLINE typename Vec::F of(typename Vec::F x) {
    using F = typename Vec::F;
    const F factor = Vec::fma(Vec::mul(x, x), Vec::broadcast(0.0713548163f), Vec::broadcast(1.5957691216f));
    return times_sigmoid<Vec>(x, Vec::mul(x, factor));
  }
};

// x * (1 + erf(x / sqrt(2))) / 2. For t = 1 / (1 + |x| / sqrt(8)) and p = a polynomial, fitted at Chebyshev's nodes,
// erfc(|x| / sqrt(2)) = t * e^(p(t) - x^2 / 2) with a relative error of 6e-8.
struct Gelu {
  template <class Vec>
  static MULTILORA_INLINE typename Vec::F of(typename Vec::F x) {
    using F = typename Vec::F;
    const F zero = Vec::zero(), one = Vec::broadcast(1.0f);
    const F size = Vec::max(x, Vec::sub(zero, x));
    const F t = Vec::div(one, Vec::fma(size, Vec::broadcast(0.353553391f), one));
    F p = Vec::broadcast(0.154191726f);
    for (const float coefficient : {-0.7310593f, 1.27436159f, -0.851879442f, 0.0475086052f, -0.0660282757f, 0.0572463484f,
                                    0.381963899f, 0.9991688f, -1.2654739f}) {
      p = Vec::fma(p, t, Vec::broadcast(coefficient));
    }
    const F power = exponential<Vec>(Vec::fma(size, Vec::mul(size, Vec::broadcast(-0.5f)), p));
    const F tail = Vec::mul(Vec::mul(t, Vec::broadcast(0.5f)), power);
    return Vec::mul(x, Vec::add(tail, Vec::zero_where_less(x, zero, Vec::sub(one, Vec::add(tail, tail)))));
  }
};

template <class Vec, class Activation>
void activate(const float* x, int64_t size, float* out, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    for_each_vector<Vec>(size, [&](int64_t i, auto part) {
      part.store(out + row * size + i, Activation::template of<Vec>(part.load(x + row * size + i)));
    });
  }
}

template <class Vec, class Activation>
void activate_mul(const float* gate_up, int64_t size, float* out, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float *gates = gate_up + 2 * row * size, *ups = gates + size;
    for_each_vector<Vec>(size, [&](int64_t i, auto part) {
      part.store(out + row * size + i, Vec::mul(Activation::template of<Vec>(part.load(gates + i)), part.load(ups + i)));
    });
  }
}

template <class Vec>
void clamped_gate_mul(const float* gate_up, int64_t size, float limit, float* out) {
  using F = typename Vec::F;
  const F most = Vec::broadcast(limit), least = Vec::broadcast(-limit), one = Vec::broadcast(1.0f);
  for_each_vector<Vec>(size, [&](int64_t i, auto part) {
    // In this order the smaller or larger of two is NaN where the second one is.
    const F gate = Vec::min(most, part.load(gate_up + i));
    const F up = Vec::max(least, Vec::min(most, part.load(gate_up + size + i)));
    part.store(out + i, times_sigmoid<Vec>(Vec::mul(gate, Vec::add(up, one)), Vec::mul(gate, Vec::broadcast(1.702f))));
  });
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
