// A whole decoder layer, called from Python without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <tuple>

#include "apply.h"
#include "paged.h"

namespace multilora {

// PackedLayerLinear of decoder_layer.py. bias: null for none.
struct LayerLinear {
  const at::Tensor& panels;
  const at::Tensor* bias;
  int64_t first_slice;
  c10::SmallVector<int64_t, 8> slice_sizes;
};

// PackedLayer of decoder_layer.py.
struct LayerWeights {
  const at::Tensor &attention_norm, &mlp_norm;
  LayerLinear qkv, o, gate_up, down;
  double eps;
};

// LayerStep of decoder_layer.py.
struct LayerStep {
  const at::Tensor &cos, &sin, &slots;
  Sequences sequences;
  double scale;
};

// The adapters of a step.
struct Adapters {
  Tables tables;
  Segments segments;
};

// `decoder_layer` of decoder_layer.py. adapters: null for none.
std::tuple<at::Tensor, at::Tensor> decoder_layer(const LayerWeights& weights, const at::Tensor& x, const at::Tensor& update,
                                                 const at::Tensor& keys, const at::Tensor& values, const LayerStep& step,
                                                 const Adapters* adapters);

}  // namespace multilora
