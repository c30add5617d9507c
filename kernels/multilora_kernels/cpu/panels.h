// Weights as Python packs them: panels of floats (PackedWeight of linear.py) or of codes (QuantizedPanels of quantized.py).
#pragma once

#include <cstdint>
#include <optional>

#include "tensor.h"
#include "work.h"

namespace multilora {

// The factors that turn codes into weights. zeros: undefined if all are zero.
// digits: of activations as integers, for a DigitUnit; 0: they are floats.
struct Scaling {
  Tensor scales, zeros;
  int64_t group_size, in_features, digits;
};

struct Panels {
  Tensor data;  // floats, or codes: int32 words of 4 bits, int8, or float8_e4m3fn
  std::optional<Scaling> scaling = {};  // of codes

  // Whether they lie as products of pairs take them: two neighbouring inputs of an output side by side, but for words of 4 bits,
  // which lie as for floats.
  bool is_paired() const { return data.dim() == 5 && data.size(4) == (data.dtype() == DType::int32 ? 1 : 2); }
  // Neighbouring inputs of an output that lie side by side.
  int64_t item_inputs() const { return data.dim() == 5 ? data.size(4) : 1; }
  int64_t in_features() const { return scaling ? scaling->in_features : data.size(2) * (is_paired() ? 2 : 1); }
};

// Refuse panels that do not hold this number of outputs in the layout of this machine.
void check_panels(const Panels& panels, int64_t out_features);

void check_codes(const Panels& panels);  // the part of check_panels that is for codes

// Checks the scaling of codes.
GroupScaling group_scaling_of(const Scaling& scaling);
LinearKernel quantized_kernel_of(const Panels& panels);

// `quantized_embedding` of quantized.py.
Tensor quantized_embedding(const Tensor& token_ids, const Panels& panels, int64_t num_embeddings);

}  // namespace multilora
