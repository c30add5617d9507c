#include "decoder_layers.h"

#include <algorithm>

#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace multilora {
namespace {

Tensor multiply(const Tensor& x, const LayerLinear& linear, const std::optional<Adapters>& adapters) {
  if (adapters) {
    return lora_linear(x, linear.panels, linear.first_slice, {linear.slice_sizes.data(), linear.slice_sizes.size()},
                       adapters->tables, adapters->blocks, linear.bias);
  }
  int64_t out_features = 0;
  for (const int64_t size : linear.slice_sizes) {
    out_features += size;
  }
  return packed_linear(x, linear.panels, out_features, linear.bias);
}

// x and the update that is still to be added to it.
using Stream = std::tuple<Tensor, Tensor>;

Stream run(const LayerWeights& weights, const Tensor& keys, const Tensor& values, const LayerStep& step, const Stream& stream) {
  const auto& [x, update] = stream;
  const auto [attention_input, before] = add_rms_norm(x, update, weights.attention_norm, weights.eps);
  const Tensor qkv = multiply(attention_input, weights.qkv, step.adapters);
  const Tensor heads = rotary_attention(qkv, {step.cos, step.sin}, keys, values, step.slots, step.sequences, step.attention);
  const Tensor attended = multiply(heads, weights.o, step.adapters);
  const auto [mlp_input, between] = add_rms_norm(before, attended, weights.mlp_norm, weights.eps);
  const Tensor activated = silu_mul(multiply(mlp_input, weights.gate_up, step.adapters));
  return {between, multiply(activated, weights.down, step.adapters)};
}

// The keys or values of one layer.
Tensor of_layer(const Tensor& cache, int64_t layer) {
  auto* data = static_cast<char*>(cache.data()) + layer * cache.stride(0) * cache.element_size();
  return {data, cache.dtype(), cache.dim() - 1, cache.sizes().data + 1, cache.strides().data + 1};
}

Stream run_all(const Decoder& decoder, const DecoderStep& step, Stream stream) {
  const int64_t num_layers = decoder.layers.size(), num_steps = step.of_layers.size();
  for (const Tensor* cache : {&step.keys, &step.values}) {
    MULTILORA_CHECK(cache->dim() == 4 && cache->size(0) == num_layers, "keys and values are [", num_layers,
                    ", slots, heads, head_dim], not ", cache->sizes());
  }
  for (int64_t i = 0; i < num_layers; ++i) {
    const auto& [weights, place] = decoder.layers[i];
    MULTILORA_CHECK_INDEX(place >= 0 && place < num_steps, "step ", place, " is none of ", num_steps);
    step.on_layer();
    stream = run(weights, of_layer(step.keys, i), of_layer(step.values, i), step.of_layers[place], stream);
  }
  return stream;
}

Tensor zeros_like(const Tensor& x) {
  Tensor zeros = Tensor::empty(x.sizes(), DType::float32);
  std::fill_n(zeros.data<float>(), zeros.numel(), 0.0f);
  return zeros;
}

Tensor rows_of(const Tensor& x, const Tensor& rows) {
  MULTILORA_CHECK(rows.dim() == 1, "rows are [any], not ", rows.sizes());
  const Tensor all = contiguous(x), places = contiguous(rows);
  const int64_t size = all.size(1);
  Tensor some = Tensor::empty({places.size(0), size}, DType::float32);
  const auto* place = places.data<int64_t>();
  for (int64_t i = 0; i < places.size(0); ++i) {
    MULTILORA_CHECK_INDEX(place[i] >= 0 && place[i] < all.size(0), "row ", place[i], " is none of ", all.size(0));
    std::copy_n(all.data<float>() + place[i] * size, size, some.data<float>() + i * size);
  }
  return some;
}

}  // namespace

std::tuple<Tensor, Tensor> decoder_layers(const Decoder& decoder, const DecoderStep& step, const Tensor& x, const Tensor& update) {
  Stream stream;
  Team::gather([&] { stream = run_all(decoder, step, {x, update}); });
  return stream;
}

Tensor decoder_logits(const Decoder& decoder, const DecoderStep& step, const Tensor& x, const Tensor& rows) {
  MULTILORA_CHECK(decoder.head, "the decoder has no head");
  const Head& head = *decoder.head;
  Tensor logits;
  Team::gather([&] {
    auto [hidden, update] = run_all(decoder, step, {x, zeros_like(x)});
    if (rows.is_defined()) {
      hidden = rows_of(hidden, rows);
      update = rows_of(update, rows);
    }
    const auto [normed, total] = add_rms_norm(hidden, update, head.norm, head.eps);
    logits = packed_linear(normed, head.panels, head.out_features, Tensor());
  });
  return logits;
}

}  // namespace multilora
