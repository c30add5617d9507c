// The operators of elementwise.py for CPU tensors (schemas: operators.py).
#include "elementwise.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Elements that are worth a thread of its own: some microseconds.
constexpr int64_t kGrainElements = 1 << 14;

int64_t grain_rows(int64_t row_size) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_size)); }

std::tuple<at::Tensor, at::Tensor> norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                        const at::Tensor* bias, double eps, NormKernel kernel) {
  TORCH_CHECK(x.dim() == 2 && x.sizes() == update.sizes() && weight.dim() == 1 && weight.size(0) == x.size(1) &&
                  (!bias || bias->sizes() == weight.sizes()),
              "x ", x.sizes(), ", update ", update.sizes(), " and weight ", weight.sizes(), " do not belong together");
  TORCH_CHECK(x.scalar_type() == at::kFloat && update.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
                  (!bias || bias->scalar_type() == at::kFloat),
              "x, update, weight and bias must be float32");
  const at::Tensor rows = x.contiguous(), updates = update.contiguous(), weights = weight.contiguous();
  const at::Tensor biases = bias ? bias->contiguous() : at::Tensor();
  at::Tensor normed = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const NormTask task{rows.const_data_ptr<float>(),
                      updates.const_data_ptr<float>(),
                      weights.const_data_ptr<float>(),
                      bias ? biases.const_data_ptr<float>() : nullptr,
                      float(eps),
                      x.size(1),
                      total.mutable_data_ptr<float>(),
                      normed.mutable_data_ptr<float>()};
  rows_in_ranges(x.size(0), grain_rows(x.size(1)), [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
  return {normed, total};
}

// parts: 2 for gates and ups, 1 for a plain activation.
at::Tensor activated(const at::Tensor& x, int64_t parts, ActivationKernel kernel) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) % parts == 0 && x.scalar_type() == at::kFloat, "expected float32 [rows, ", parts,
              " * size], not ", x.scalar_type(), " ", x.sizes());
  const at::Tensor rows = x.contiguous();
  const int64_t size = x.size(1) / parts;
  at::Tensor out = at::empty({x.size(0), size}, x.options());
  const float* from = rows.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  rows_in_ranges(x.size(0), grain_rows(size), [&](int64_t begin, int64_t end) { kernel(from, size, to, begin, end); });
  return out;
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm_operator(const at::Tensor& x, const at::Tensor& update,
                                                           const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                                           double eps) {
  return add_layer_norm(x, update, weight, bias ? &*bias : nullptr, eps);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                                double eps) {
  return norm(x, update, weight, nullptr, eps, capability().add_rms_norm);
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                                  const at::Tensor* bias, double eps) {
  return norm(x, update, weight, bias, eps, capability().add_layer_norm);
}

at::Tensor silu_mul(const at::Tensor& gate_up) { return activated(gate_up, 2, capability().silu_mul); }

at::Tensor gelu_tanh_mul(const at::Tensor& gate_up) { return activated(gate_up, 2, capability().gelu_tanh_mul); }

at::Tensor gelu_tanh(const at::Tensor& x) { return activated(x, 1, capability().gelu_tanh); }

}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("add_rms_norm", multilora::add_rms_norm);
  m.impl("add_layer_norm", multilora::add_layer_norm_operator);
  m.impl("silu_mul", multilora::silu_mul);
  m.impl("gelu_tanh_mul", multilora::gelu_tanh_mul);
  m.impl("gelu_tanh", multilora::gelu_tanh);
}
