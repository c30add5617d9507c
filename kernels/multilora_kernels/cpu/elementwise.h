// The operators between matrix products.
#pragma once

#include <tuple>

#include "tensor.h"

namespace multilora {

// The functions of elementwise.py with these names. bias: undefined for none.
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& update, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& update, const Tensor& weight, const Tensor& bias,
                                          double eps);
Tensor silu_mul(const Tensor& gate_up);
Tensor gelu_tanh_mul(const Tensor& gate_up);
Tensor gelu_tanh(const Tensor& x);
Tensor gelu(const Tensor& x);

// `rotary_angles` of rotary_angles.py.
std::tuple<Tensor, Tensor> rotary_angles(const Tensor& positions, const Tensor& frequencies);

}  // namespace multilora
