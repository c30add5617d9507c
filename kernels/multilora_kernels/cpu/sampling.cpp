// The operator sample_tokens.
#include "sample_tokens.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Logits that are worth a thread: some microseconds.
constexpr int64_t kGrainLogits = 1 << 14;
constexpr int64_t kNumParameters = 5;

void check_logits(const Tensor& logits) {
  MULTILORA_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1 && logits.dtype() == DType::float32,
                  "logits must be float32 [rows, vocab], not ", name_of(logits.dtype()), " ", logits.sizes());
}

}  // namespace

Tensor sample_tokens(const Tensor& logits, const Tensor& parameters) {
  check_logits(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  MULTILORA_CHECK(parameters.dim() == 2 && parameters.size(0) == rows && parameters.size(1) == kNumParameters &&
                      parameters.is_contiguous() && parameters.dtype() == DType::float64,
                  "parameters must be float64 [", rows, ", ", kNumParameters, "], not ", name_of(parameters.dtype()), " ",
                  parameters.sizes());
  Tensor token_ids = Tensor::empty({rows}, DType::int64);
  int64_t* to = token_ids.data<int64_t>();
  const float* from = logits.data<float>();
  const double* values = parameters.data<double>();
  const int64_t grain = std::max<int64_t>(1, kGrainLogits / vocab);
  const int64_t threads = std::clamp<int64_t>(rows / grain, 1, Team::available()), size = padded_vocab(vocab);
  const Tensor memory = Tensor::empty({threads, size}, DType::float32);
  float* weights = memory.data<float>();
  Turns turns(rows);
  Team::share_out(threads, [&](int64_t thread) {
    turns.take([&](int64_t row) {
      const double* of = values + row * kNumParameters;
      const SamplingParameters one{of[0], int64_t(of[1]), of[2], of[3], of[4]};
      to[row] = capability().sample(from + row * logits.stride(0), vocab, one, weights + thread * size);
    });
  });
  return token_ids;
}

std::tuple<Tensor, bool> most_probable(const Tensor& logits) {
  check_logits(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor token_ids = Tensor::empty({rows}, DType::int64);
  int64_t* to = token_ids.data<int64_t>();
  std::atomic<bool> are_sound{true};
  rows_in_ranges(rows, std::max<int64_t>(1, kGrainLogits / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* of_row = logits.data<float>() + row * logits.stride(0);
      to[row] = capability().most_probable(of_row, vocab);
      if (const float chosen = of_row[to[row]]; !std::isfinite(chosen) || chosen == 0) {
        are_sound = false;
      }
    }
  });
  return {token_ids, are_sound};
}

}  // namespace multilora
