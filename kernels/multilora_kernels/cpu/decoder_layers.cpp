#include "decoder_layers.h"

#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace multilora {
namespace {

Tensor multiply(const Tensor& x, const LayerLinear& linear, const std::optional<Adapters>& adapters) {
  if (adapters) {
    return lora_linear(x, linear.panels, linear.first_slice, {linear.slice_sizes.data(), linear.slice_sizes.size()},
                       adapters->tables, adapters->segments, linear.bias);
  }
  int64_t out_features = 0;
  for (const int64_t size : linear.slice_sizes) {
    out_features += size;
  }
  return packed_linear(x, linear.panels, out_features, linear.bias);
}

// x and the update that is still to be added to it.
using Stream = std::tuple<Tensor, Tensor>;

Stream run(const Layer& layer, const Stream& stream) {
  const auto& [weights, keys, values, step] = layer;
  const auto& [x, update] = stream;
  const auto [attention_input, before] = add_rms_norm(x, update, weights.attention_norm, weights.eps);
  const Tensor qkv = multiply(attention_input, weights.qkv, step.adapters);
  const Tensor heads = rotary_attention(qkv, {step.cos, step.sin}, keys, values, step.slots, step.sequences, step.attention);
  const Tensor attended = multiply(heads, weights.o, step.adapters);
  const auto [mlp_input, between] = add_rms_norm(before, attended, weights.mlp_norm, weights.eps);
  const Tensor activated = silu_mul(multiply(mlp_input, weights.gate_up, step.adapters));
  return {between, multiply(activated, weights.down, step.adapters)};
}

}  // namespace

std::tuple<Tensor, Tensor> decoder_layers(std::span<const Layer> layers, const Tensor& x, const Tensor& update,
                                          FunctionRef<void()> on_layer) {
  Stream stream{x, update};
  Team::gather([&] {
    for (const Layer& layer : layers) {
      on_layer();
      stream = run(layer, stream);
    }
  });
  return stream;
}

}  // namespace multilora
