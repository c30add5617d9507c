// Attention over the paged cache, with rotation and storage before it or without.
#pragma once

#include <cstdint>

#include "tensor.h"

namespace multilora {

// PagedSequences of attention.py; window 0 is all keys.
struct Sequences {
  Tensor block_tables, query_starts, context_lens;
  int64_t num_decodes, block_size, window;
};

// AttentionOptions of attention.py. sinks, distance_bias: undefined for none.
struct AttentionOptions {
  double scale, softcap = 0;
  Tensor sinks = {}, distance_bias = {};
  bool may_round = false;
};

// cos and sin of `rotary_attention`.
struct Angles {
  Tensor cos, sin;
  bool is_interleaved = false;
};

// Elements of a head in a KV cache.
int64_t head_dim_of(const Tensor& cache);

// `paged_attention` of attention.py.
Tensor paged_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Sequences& sequences,
                       const AttentionOptions& options);

// `rotary_attention` of attention.py.
Tensor rotary_attention(const Tensor& qkv, const Angles& angles, const Tensor& keys, const Tensor& values, const Tensor& slots,
                        const Sequences& sequences, const AttentionOptions& options);

}  // namespace multilora
