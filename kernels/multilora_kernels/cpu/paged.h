// Attention over the paged cache with all that comes before it, which Python also calls without the dispatcher (python.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace multilora {

// PagedSequences of attention.py; window 0 is all keys.
struct Sequences {
  const at::Tensor &block_tables, &query_starts, &context_lens;
  int64_t block_size, window;
};

// `rotary_attention` of attention.py.
at::Tensor rotary_attention(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys,
                            const at::Tensor& values, const at::Tensor& slots, const Sequences& sequences, double scale);

}  // namespace multilora
