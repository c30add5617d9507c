// Whole decoder layers, called from Python in one call (python.cpp).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "function_ref.h"
#include "lora_tasks.h"
#include "paged.h"
#include "panels.h"
#include "short_list.h"
#include "tensor.h"

namespace multilora {

// PackedLayerLinear of decoder_layers.py. bias: undefined for none.
struct LayerLinear {
  Panels panels;
  Tensor bias;
  int64_t first_slice;
  ShortList<int64_t, 8> slice_sizes;
};

// PackedLayer of decoder_layers.py.
struct LayerWeights {
  Tensor attention_norm, mlp_norm;
  LayerLinear qkv, o, gate_up, down;
  double eps;
};

// The adapters of a step. Tensors of its segments have the blocks' tokens.
struct Adapters {
  Tables tables;
  Blocks blocks;
};

// LayerStep of decoder_layers.py.
struct LayerStep {
  Tensor cos, sin, slots;
  Sequences sequences;
  AttentionOptions attention;
  std::optional<Adapters> adapters;
};

// One layer, and the place of its step among those of all layers.
struct Layer {
  LayerWeights weights;
  int64_t step;
};

// PackedHead of decoder_layers.py.
struct Head {
  Tensor norm;
  double eps;
  Panels panels;
  int64_t out_features;
};

// PackedDecoder of decoder_layers.py.
struct Decoder {
  std::vector<Layer> layers;
  std::optional<Head> head;
};

// The inputs of a step, by decoder_layers.py. keys, values: of all layers.
struct DecoderStep {
  std::vector<LayerStep> of_layers;
  Tensor keys, values;
  FunctionRef<void()> on_layer;
};

// `decoder_layers` and `decoder_logits` of decoder_layers.py. rows: undefined for all of them.
std::tuple<Tensor, Tensor> decoder_layers(const Decoder& decoder, const DecoderStep& step, const Tensor& x, const Tensor& update);
Tensor decoder_logits(const Decoder& decoder, const DecoderStep& step, const Tensor& x, const Tensor& rows);

}  // namespace multilora
