// The operator multilora::sample_tokens.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Logits that are worth a thread: some microseconds.
constexpr int64_t kGrainLogits = 1 << 14;
constexpr int64_t kNumParameters = 5;

at::Tensor sample_tokens(const at::Tensor& logits, const at::Tensor& parameters) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1 && logits.scalar_type() == at::kFloat,
              "logits must be float32 [rows, vocab], not ", logits.scalar_type(), " ", logits.sizes());
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  TORCH_CHECK(parameters.dim() == 2 && parameters.size(0) == rows && parameters.size(1) == kNumParameters &&
                  parameters.is_contiguous() && parameters.scalar_type() == at::kDouble,
              "parameters must be float64 [", rows, ", ", kNumParameters, "], not ", parameters.scalar_type(), " ",
              parameters.sizes());
  at::Tensor token_ids = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* to = token_ids.mutable_data_ptr<int64_t>();
  const float* from = logits.const_data_ptr<float>();
  const double* values = parameters.const_data_ptr<double>();
  const int64_t grain = std::max<int64_t>(1, kGrainLogits / vocab);
  const int64_t threads = std::clamp<int64_t>(rows / grain, 1, Team::available()), size = padded_vocab(vocab);
  const at::Tensor memory = at::empty({threads, size}, logits.options());
  float* weights = memory.mutable_data_ptr<float>();
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

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) { m.impl("sample_tokens", multilora::sample_tokens); }
