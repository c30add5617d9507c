// Whole decoder layers, called from Python without the dispatcher (python.cpp).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>

#include "apply.h"
#include "function_ref.h"
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

// The adapters of a step.
struct Adapters {
  Tables tables;
  Segments segments;
};

// LayerStep of decoder_layers.py.
struct LayerStep {
  Tensor cos, sin, slots;
  Sequences sequences;
  AttentionOptions attention;
  std::optional<Adapters> adapters;
};

// One layer of a step.
struct Layer {
  LayerWeights weights;
  Tensor keys, values;
  LayerStep step;
};

// `decoder_layers` of decoder_layers.py.
std::tuple<Tensor, Tensor> decoder_layers(std::span<const Layer> layers, const Tensor& x, const Tensor& update,
                                          FunctionRef<void()> on_layer);

}  // namespace multilora
