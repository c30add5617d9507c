// Whole decoder layers, called from Python without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "apply.h"
#include "paged.h"
#include "panels.h"

namespace multilora {

// PackedLayerLinear of decoder_layers.py. bias: null for none.
struct LayerLinear {
  Panels panels;
  const at::Tensor* bias;
  int64_t first_slice;
  c10::SmallVector<int64_t, 8> slice_sizes;
};

// PackedLayer of decoder_layers.py.
struct LayerWeights {
  const at::Tensor &attention_norm, &mlp_norm;
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
  const at::Tensor &cos, &sin, &slots;
  Sequences sequences;
  AttentionOptions attention;
  std::optional<Adapters> adapters;
};

// One layer of a step.
struct Layer {
  LayerWeights weights;
  const at::Tensor &keys, &values;
  LayerStep step;
};

// `decoder_layers` of decoder_layers.py.
std::tuple<at::Tensor, at::Tensor> decoder_layers(c10::ArrayRef<Layer> layers, const at::Tensor& x, const at::Tensor& update,
                                                  c10::function_ref<void()> on_layer);

}  // namespace multilora
