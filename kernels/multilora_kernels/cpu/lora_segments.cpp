// `lora_segments` of lora_segments.py.
#include <algorithm>
#include <tuple>
#include <vector>

#include "apply.h"
#include "checks.h"

namespace multilora {
namespace {

struct Token {
  int64_t lora_index;
  int32_t place;  // in the batch
};

// The tokens that have adapters, those of the first adapter first.
template <class T>
std::vector<Token> sorted_by_adapter(const Tensor& token_lora_mapping, int64_t max_loras) {
  const T* lora_index = token_lora_mapping.data<T>();
  std::vector<Token> tokens;
  tokens.reserve(token_lora_mapping.numel());
  for (int64_t i = 0; i < token_lora_mapping.numel(); ++i) {
    MULTILORA_CHECK_INDEX(lora_index[i] < max_loras, "adapter ", lora_index[i], " of token ", i, " is none of ", max_loras);
    if (lora_index[i] >= 0) {
      tokens.push_back({lora_index[i], static_cast<int32_t>(i)});
    }
  }
  std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) {
    return std::tie(a.lora_index, a.place) < std::tie(b.lora_index, b.place);
  });
  return tokens;
}

}  // namespace

Segments lora_segments(const Tensor& token_lora_mapping, int64_t max_loras, int64_t chunk_size, int64_t capacity) {
  const bool is_narrow = token_lora_mapping.dtype() == DType::int32;
  MULTILORA_CHECK(token_lora_mapping.dim() == 1 && token_lora_mapping.is_contiguous() &&
                      (is_narrow || token_lora_mapping.dtype() == DType::int64),
                  "token_lora_mapping must be contiguous int32 or int64 [tokens], not ", name_of(token_lora_mapping.dtype()),
                  " ", token_lora_mapping.sizes());
  const std::vector<Token> tokens = is_narrow ? sorted_by_adapter<int32_t>(token_lora_mapping, max_loras)
                                              : sorted_by_adapter<int64_t>(token_lora_mapping, max_loras);
  const auto empty = [](int64_t size) { return Tensor::empty({size}, DType::int32); };
  const Segments segments{empty(token_lora_mapping.numel()), empty(capacity), empty(capacity), empty(capacity)};
  auto *permutation = segments.permutation.data<int32_t>(), *start = segments.chunk_start.data<int32_t>(),
       *length = segments.chunk_length.data<int32_t>(), *lora_index = segments.chunk_lora_index.data<int32_t>();
  int64_t chunk = -1;
  for (int64_t i = 0; i < static_cast<int64_t>(tokens.size()); ++i) {
    permutation[i] = tokens[i].place;
    if (chunk < 0 || lora_index[chunk] != tokens[i].lora_index || length[chunk] == chunk_size) {
      ++chunk;
      MULTILORA_CHECK(chunk < capacity, "more chunks than ", capacity);
      start[chunk] = static_cast<int32_t>(i);
      length[chunk] = 0;
      lora_index[chunk] = static_cast<int32_t>(tokens[i].lora_index);
    }
    ++length[chunk];
  }
  const int64_t chunks = chunk + 1;
  std::fill(start + chunks, start + capacity, 0);
  std::fill(length + chunks, length + capacity, 0);
  std::fill(lora_index + chunks, lora_index + capacity, -1);
  return segments;
}

}  // namespace multilora
