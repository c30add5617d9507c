// The operators between matrix products, which Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace multilora {

// `add_rms_norm` and `silu_mul` of elementwise.py.
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                                double eps);
at::Tensor silu_mul(const at::Tensor& gate_up);

}  // namespace multilora
