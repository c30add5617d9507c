"""`route` and `expert_mlp`: a mixture of experts. Each token uses a few experts."""

from __future__ import annotations

import torch

from multilora_kernels import reference
from multilora_kernels.cpu import compiled_kernels
from multilora_kernels.dispatch import gpu_operator, operator
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.packed_experts import PackedExperts
from multilora_kernels.tables import ExpertLoRA


def route(logits: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts of the largest logits for each token, and their shares in the softmax over all experts.

    Of equal logits, the one of the lower expert comes first. is_normalised: the shares of a token are divided by their
    sum, which makes them the softmax over the chosen experts alone.

    logits: [num_tokens, num_experts] float32. Returns (expert_ids, weights): [num_tokens, top_k] int32 and float32, the
    largest first.
    """
    assert 1 <= top_k <= logits.shape[1]
    is_reference = logits.dtype != torch.float32 and not has_gpu_operators(logits.device)
    function = reference.route if is_reference else operator("route", logits)
    return function(logits, top_k, is_normalised)


def expert_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamp_limit: float = 0.0,
    lora: ExpertLoRA | None = None,
) -> torch.Tensor:
    """y[t] = sum over k of weights[t, k] * MLP of expert_ids[t, k] of x[t], summed in the order of k.

    The MLP of expert e, with the adapter of the token:
        gate = x W_gate[e]^T + x A_gate[e]^T B_gate[e]^T + gate_up_bias[e, :I]; up the same with gate_up_bias[e, I:];
        h = silu(gate) * up; or, if clamp_limit > 0, with gate = min(gate, clamp_limit) and up between -clamp_limit and
        clamp_limit, h = (up + 1) * gate * sigmoid(1.702 * gate), as in gpt-oss;
        MLP = h W_down[e]^T + h A_down[e]^T B_down[e]^T + down_bias[e].
    Only experts that a token uses are read. Float sums are float32. On a CPU a token has the same bits alone and in any
    batch.

    x: [num_tokens, H] of the activations' dtype, float32 if the weights are packed.
    expert_ids: [num_tokens, top_k] int32, below the number E of experts. weights: [num_tokens, top_k] float32.
    gate_up: [E, 2 I, H], the rows of gate before those of up. down: [E, H, I].
    gate_up_bias, down_bias: [E, 2 I] and [E, H], contiguous, in the dtype of x.
    lora: where no adapter changes an expert, its rank is 0.
    Returns [num_tokens, H] in the dtype of x. Raises IndexError on a CPU with compiled kernels for an expert, or a row
    of the tables, that does not exist.
    """
    if not gate_up.is_packed:
        function = gpu_operator("expert_mlp") if has_gpu_operators(x.device) else reference.expert_mlp
        return function(x, expert_ids, weights, gate_up, down, gate_up_bias, down_bias, clamp_limit, lora)
    num_experts, num_inner, _ = gate_up.shape
    packed = (num_experts, gate_up.panels, num_inner, down.panels, down.shape[1])
    others = (gate_up_bias, down_bias, clamp_limit, lora)
    return compiled_kernels().expert_mlp(x, expert_ids, weights, *packed, *others)  # type: ignore[no-any-return]
