#include "decoder_layer.h"

#include <ATen/ops/add.h>

#include "elementwise.h"
#include "linear.h"

namespace multilora {
namespace {

at::Tensor multiply(const at::Tensor& x, const LayerLinear& linear, const Adapters* adapters) {
  if (adapters) {
    return lora_linear(x, linear.panels, linear.first_slice, linear.slice_sizes, adapters->tables, adapters->segments,
                       linear.bias);
  }
  int64_t out_features = 0;
  for (const int64_t size : linear.slice_sizes) {
    out_features += size;
  }
  at::Tensor y = packed_linear(x, linear.panels, out_features);
  return linear.bias ? y.add_(*linear.bias) : y;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> decoder_layer(const LayerWeights& weights, const at::Tensor& x, const at::Tensor& update,
                                                 const at::Tensor& keys, const at::Tensor& values, const LayerStep& step,
                                                 const Adapters* adapters) {
  const auto [attention_input, before] = add_rms_norm(x, update, weights.attention_norm, weights.eps);
  const at::Tensor qkv = multiply(attention_input, weights.qkv, adapters);
  const at::Tensor heads = rotary_attention(qkv, step.cos, step.sin, keys, values, step.slots, step.sequences, step.scale);
  const at::Tensor attended = multiply(heads, weights.o, adapters);
  const auto [mlp_input, between] = add_rms_norm(before, attended, weights.mlp_norm, weights.eps);
  const at::Tensor activated = silu_mul(multiply(mlp_input, weights.gate_up, adapters));
  return {between, multiply(activated, weights.down, adapters)};
}

}  // namespace multilora
