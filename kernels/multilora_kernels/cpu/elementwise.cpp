// The operators multilora::add_rms_norm and silu_mul for CPU tensors (schemas: operators.py).
#include "elementwise.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Elements that are worth a thread of its own: some microseconds.
constexpr int64_t kGrainElements = 1 << 14;

int64_t grain_rows(int64_t row_size) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_size)); }

}  // namespace

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                                double eps) {
  TORCH_CHECK(x.dim() == 2 && x.sizes() == update.sizes() && weight.dim() == 1 && weight.size(0) == x.size(1), "x ", x.sizes(),
              ", update ", update.sizes(), " and weight ", weight.sizes(), " do not belong together");
  TORCH_CHECK(x.scalar_type() == at::kFloat && update.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat,
              "x, update and weight must be float32");
  const at::Tensor rows = x.contiguous(), updates = update.contiguous(), weights = weight.contiguous();
  at::Tensor normed = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const NormTask task{rows.const_data_ptr<float>(), updates.const_data_ptr<float>(), weights.const_data_ptr<float>(),
                      float(eps),                   x.size(1),                       total.mutable_data_ptr<float>(),
                      normed.mutable_data_ptr<float>()};
  rows_in_ranges(x.size(0), grain_rows(x.size(1)),
               [&](int64_t begin, int64_t end) { capability().add_rms_norm(task, begin, end); });
  return {normed, total};
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0 && gate_up.scalar_type() == at::kFloat,
              "gate_up must be float32 [rows, 2 * size], not ", gate_up.scalar_type(), " ", gate_up.sizes());
  const at::Tensor rows = gate_up.contiguous();
  const int64_t size = gate_up.size(1) / 2;
  at::Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  const float* from = rows.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  rows_in_ranges(gate_up.size(0), grain_rows(size),
               [&](int64_t begin, int64_t end) { capability().silu_mul(from, size, to, begin, end); });
  return out;
}

}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("add_rms_norm", multilora::add_rms_norm);
  m.impl("silu_mul", multilora::silu_mul);
}
