// Mixtures of experts: the operators of experts.py.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "apply.h"
#include "panels.h"
#include "tensor.h"

namespace multilora {

// PackedExperts of packed_experts.py: `out_features` outputs each, in a whole number of panels.
struct Experts {
  Panels panels;
  int64_t num_experts, out_features;
};

// ExpertLoRA of tables.py.
struct ExpertAdapters {
  Tables tables;
  Tensor mapping;
  int64_t gate_column, up_column, down_column;
};

// The chosen experts of tokens, and their shares: [num_tokens, top_k] int32 and float32.
struct Routes {
  Tensor expert_ids, weights;
};

// `route` of experts.py.
std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k, bool is_normalised);

// `expert_mlp` of experts.py. Biases: undefined for none.
Tensor expert_mlp(const Tensor& x, const Routes& routes, const Experts& gate_up, const Experts& down, const Tensor& gate_up_bias,
                  const Tensor& down_bias, double clamp_limit, const std::optional<ExpertAdapters>& adapters);

}  // namespace multilora
