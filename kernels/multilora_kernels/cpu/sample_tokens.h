// The choice of the next tokens.
#pragma once

#include "tensor.h"

namespace multilora {

// `sample_tokens` of sampling.py. parameters: float64 [rows, 5], the fields of `SamplingParameters`.
Tensor sample_tokens(const Tensor& logits, const Tensor& parameters);

}  // namespace multilora
