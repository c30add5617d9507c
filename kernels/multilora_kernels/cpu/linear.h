// The operators over packed weights, which Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace multilora {

// `packed_linear` and `packed_embedding` of linear.py.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& panels, int64_t out_features);
at::Tensor packed_embedding(const at::Tensor& token_ids, const at::Tensor& panels, int64_t num_embeddings);

}  // namespace multilora
