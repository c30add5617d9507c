#include "lora_tasks.h"

namespace multilora {

Blocks blocks_of(const Segments& segments) {
  const auto *tokens = segments.permutation.data<int32_t>(), *start = segments.chunk_start.data<int32_t>(),
             *length = segments.chunk_length.data<int32_t>(), *lora_index = segments.chunk_lora_index.data<int32_t>();
  const int64_t capacity = segments.chunk_start.numel();
  Blocks blocks;
  if (capacity > 0 && length[0] > 0) {
    blocks.reserve(capacity);
  }
  for (int64_t c = 0; c < capacity && length[c] > 0; ++c) {
    MULTILORA_CHECK(length[c] <= kMaxRows, "a chunk of ", length[c], " tokens exceeds ", kMaxRows);
    const bool joins = !blocks.empty() && blocks.back().lora_index == lora_index[c] &&
        blocks.back().rows.count + length[c] <= kMaxRows;
    if (joins) {
      blocks.back().rows.count += length[c];
    } else {
      blocks.push_back({lora_index[c], {tokens + start[c], length[c]}});
    }
  }
  return blocks;
}

Tensor as_float32_rows(const Tensor& x) {
  const bool is_already = x.dtype() == DType::float32 && x.stride(1) == 1;
  return is_already ? x : as_float32(x);
}

}  // namespace multilora
