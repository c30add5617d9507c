// The operators of elementwise.py for CPU tensors.
#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Elements that are worth a thread of its own: a microsecond.
constexpr int64_t kGrainElements = 1 << 11;
// The same for angles, each of which takes longer.
constexpr int64_t kGrainAngles = 1 << 9;

int64_t grain_rows(int64_t row_size) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_size)); }

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor& update, const Tensor& weight, const Tensor& bias, double eps,
                                NormKernel kernel) {
  MULTILORA_CHECK(x.dim() == 2 && x.sizes() == update.sizes() && weight.dim() == 1 && weight.size(0) == x.size(1) &&
                      (!bias.is_defined() || bias.sizes() == weight.sizes()),
                  "x ", x.sizes(), ", update ", update.sizes(), " and weight ", weight.sizes(), " do not belong together");
  MULTILORA_CHECK(x.dtype() == DType::float32 && update.dtype() == DType::float32 && weight.dtype() == DType::float32 &&
                      (!bias.is_defined() || bias.dtype() == DType::float32),
                  "x, update, weight and bias must be float32");
  const Tensor rows = contiguous(x), updates = contiguous(update), weights = contiguous(weight);
  const Tensor biases = bias.is_defined() ? contiguous(bias) : Tensor();
  Tensor normed = Tensor::empty(x.sizes(), DType::float32), total = Tensor::empty(x.sizes(), DType::float32);
  const NormTask task{rows.data<float>(),
                      updates.data<float>(),
                      weights.data<float>(),
                      bias.is_defined() ? biases.data<float>() : nullptr,
                      float(eps),
                      x.size(1),
                      total.data<float>(),
                      normed.data<float>()};
  rows_in_ranges(x.size(0), grain_rows(x.size(1)), [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
  return {normed, total};
}

// parts: 2 for gates and ups, 1 for a plain activation.
Tensor activated(const Tensor& x, int64_t parts, ActivationKernel kernel) {
  MULTILORA_CHECK(x.dim() == 2 && x.size(1) % parts == 0 && x.dtype() == DType::float32, "expected float32 [rows, ", parts,
                  " * size], not ", name_of(x.dtype()), " ", x.sizes());
  const Tensor rows = contiguous(x);
  const int64_t size = x.size(1) / parts;
  Tensor out = Tensor::empty({x.size(0), size}, DType::float32);
  const float* from = rows.data<float>();
  float* to = out.data<float>();
  rows_in_ranges(x.size(0), grain_rows(size), [&](int64_t begin, int64_t end) { kernel(from, size, to, begin, end); });
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& update, const Tensor& weight, double eps) {
  return norm(x, update, weight, Tensor(), eps, capability().add_rms_norm);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& update, const Tensor& weight, const Tensor& bias,
                                          double eps) {
  return norm(x, update, weight, bias, eps, capability().add_layer_norm);
}

Tensor silu_mul(const Tensor& gate_up) { return activated(gate_up, 2, capability().silu_mul); }

Tensor gelu_tanh_mul(const Tensor& gate_up) { return activated(gate_up, 2, capability().gelu_tanh_mul); }

Tensor gelu_tanh(const Tensor& x) { return activated(x, 1, capability().gelu_tanh); }

Tensor gelu(const Tensor& x) { return activated(x, 1, capability().gelu); }

std::tuple<Tensor, Tensor> rotary_angles(const Tensor& positions, const Tensor& frequencies) {
  MULTILORA_CHECK(positions.dim() == 1 && positions.dtype() == DType::int64 && frequencies.dim() == 1 &&
                      frequencies.dtype() == DType::float32,
                  "positions must be int64 [tokens] and frequencies float32 [size], not ", name_of(positions.dtype()), " ",
                  positions.sizes(), " and ", name_of(frequencies.dtype()), " ", frequencies.sizes());
  const Tensor places = contiguous(positions), factors = contiguous(frequencies);
  const int64_t tokens = places.size(0), size = factors.size(0);
  const auto* position = places.data<int64_t>();
  const auto* factor = factors.data<float>();
  Tensor cos = Tensor::empty({tokens, 1, size}, DType::float32), sin = Tensor::empty({tokens, 1, size}, DType::float32);
  float *cosines = cos.data<float>(), *sines = sin.data<float>();
  rows_in_ranges(tokens, std::max<int64_t>(1, kGrainAngles / std::max<int64_t>(1, size)), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t i = 0; i < size; ++i) {
        const float angle = float(position[token]) * factor[i];
        cosines[token * size + i] = std::cos(angle);
        sines[token * size + i] = std::sin(angle);
      }
    }
  });
  return {cos, sin};
}

}  // namespace multilora
