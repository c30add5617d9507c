"""Which wire module a linear of a Hugging Face model is, by its name within a decoder layer.

Upstream's names mislead: `mlp_h_to_4h` (5) is the linear under the activation, `gate_proj`, and `mlp_gate` (7) is the
linear that the activation is multiplied with, `up_proj`. The same holds for experts (13 and 15) and for shared experts
(19 and 21); the gate of a shared expert as a whole is `mlp_router` (17). See `sites` for sizes and columns.
"""

from __future__ import annotations

from collections.abc import Mapping

ATTN_QKV, ATTN_Q, ATTN_K, ATTN_V, ATTN_DENSE = range(5)
MLP_H_TO_4H, MLP_4H_TO_H, MLP_GATE = range(5, 8)
CROSS_QKV, CROSS_Q, CROSS_K, CROSS_V, CROSS_DENSE = range(8, 13)
MOE_H_TO_4H, MOE_4H_TO_H, MOE_GATE, MOE_ROUTER, SHARED_EXPERT_GATE = range(13, 18)
MLP_GATE_UP = 18
SHARED_H_TO_4H, SHARED_4H_TO_H, SHARED_UP = range(19, 22)

UPSTREAM_NAMES: Mapping[int, str] = {
    ATTN_QKV: "attn_qkv",
    ATTN_Q: "attn_q",
    ATTN_K: "attn_k",
    ATTN_V: "attn_v",
    ATTN_DENSE: "attn_dense",
    MLP_H_TO_4H: "mlp_h_to_4h",
    MLP_4H_TO_H: "mlp_4h_to_h",
    MLP_GATE: "mlp_gate",
    CROSS_QKV: "cross_attn_qkv",
    CROSS_Q: "cross_attn_q",
    CROSS_K: "cross_attn_k",
    CROSS_V: "cross_attn_v",
    CROSS_DENSE: "cross_attn_dense",
    MOE_H_TO_4H: "moe_h_to_4h",
    MOE_4H_TO_H: "moe_4h_to_h",
    MOE_GATE: "moe_gate",
    MOE_ROUTER: "moe_router",
    SHARED_EXPERT_GATE: "mlp_router",
    MLP_GATE_UP: "mlp_gate_up",
    SHARED_H_TO_4H: "shared_expert_h_to_4h",
    SHARED_4H_TO_H: "shared_expert_4h_to_h",
    SHARED_UP: "shared_expert_gate",
}

MODULE_IDS: Mapping[str, int] = {
    "self_attn.qkv_proj": ATTN_QKV,
    "self_attn.q_proj": ATTN_Q,
    "self_attn.k_proj": ATTN_K,
    "self_attn.v_proj": ATTN_V,
    "self_attn.o_proj": ATTN_DENSE,
    "mlp.gate_proj": MLP_H_TO_4H,
    "mlp.up_proj": MLP_GATE,
    "mlp.down_proj": MLP_4H_TO_H,
    "mlp.gate_up_proj": MLP_GATE_UP,
    # An MLP without a gate, as StarCoder 2's.
    "mlp.c_fc": MLP_H_TO_4H,
    "mlp.c_proj": MLP_4H_TO_H,
    # The router of a mixture, and the expert that all tokens use with its gate. `peft_experts` names other experts.
    "mlp.gate": MOE_ROUTER,
    "mlp.shared_expert.gate_proj": SHARED_H_TO_4H,
    "mlp.shared_expert.up_proj": SHARED_UP,
    "mlp.shared_expert.down_proj": SHARED_4H_TO_H,
    "mlp.shared_expert_gate": SHARED_EXPERT_GATE,
}
"""Module ids by Hugging Face's names in models without an encoder. The fused ones compute q | k | v and gate | up;
upstream's `mlp_gate_up` computes up | gate."""

FUSED_NAMES: Mapping[int, str] = {
    module_id: name for name, module_id in MODULE_IDS.items() if module_id in (ATTN_QKV, MLP_GATE_UP)
}
"""Hugging Face's names of the modules that several linears of other checkpoints make up; cross attention has none."""
