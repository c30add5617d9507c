// The operators between matrix products, which Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace multilora {

// The functions of elementwise.py with these names. bias: null for none.
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                                double eps);
std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& update, const at::Tensor& weight,
                                                  const at::Tensor* bias, double eps);
at::Tensor silu_mul(const at::Tensor& gate_up);
at::Tensor gelu_tanh_mul(const at::Tensor& gate_up);
at::Tensor gelu_tanh(const at::Tensor& x);

}  // namespace multilora
