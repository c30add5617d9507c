// Attention over the paged cache, with rotation and storage before it. Python also calls it without the dispatcher
// (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace multilora {

// PagedSequences of attention.py; window 0 is all keys.
struct Sequences {
  const at::Tensor &block_tables, &query_starts, &context_lens;
  int64_t num_decodes, block_size, window;
};

// AttentionOptions of attention.py. sinks: null for none.
struct AttentionOptions {
  double scale, softcap = 0;
  const at::Tensor* sinks = nullptr;
  bool may_round = false;
};

// cos and sin of `rotary_attention`.
struct Angles {
  const at::Tensor &cos, &sin;
  bool is_interleaved = false;
};

// Elements of a head in a KV cache.
int64_t head_dim_of(const at::Tensor& cache);

// `rotary_attention` of attention.py.
at::Tensor rotary_attention(const at::Tensor& qkv, const Angles& angles, const at::Tensor& keys, const at::Tensor& values,
                            const at::Tensor& slots, const Sequences& sequences, const AttentionOptions& options);

}  // namespace multilora
