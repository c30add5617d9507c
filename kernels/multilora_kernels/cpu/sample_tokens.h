// The choice of the next tokens.
#pragma once

#include <tuple>

#include "tensor.h"

namespace multilora {

// `sample_tokens` of sampling.py. parameters: float64 [rows, 5], the fields of `SamplingParameters`.
Tensor sample_tokens(const Tensor& logits, const Tensor& parameters);

// `most_probable` of sampling.py.
std::tuple<Tensor, bool> most_probable(const Tensor& logits);

}  // namespace multilora
