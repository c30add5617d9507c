"""The modules of a decoder as transformers makes them, without weights. They attend by a function of ours.

transformers calls the function that is registered under the name in the config, with the attention module first. The
function calls this module's `multilora_attend`, which whoever made the tree has set. So a tree has no state outside of
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.core_model_loading import build_glob_alternation
from transformers.initialization import meta_device_safe_creation_ops
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PAGED, TRACED, EAGER = "multilora", "multilora_trace", "eager"
"""Names of attention: of ours, of the trace, and of transformers' own. Ours has no mask: it knows the sequences."""

EXPERTS = "multilora"
"""The name of our function for experts."""

Attend = Callable[..., torch.Tensor]
"""Gets queries, keys and values [1, heads, num_tokens, head_dim], the mask, and the options of attention by their
names; returns [1, num_tokens, heads, head_dim]."""

MaskPattern = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether a query attends to a key, by batch, head, query and key; transformers' form of a mask."""


def read_hf_config(path: Path) -> PreTrainedConfig:
    """The config of a checkpoint as transformers reads it. No code of the checkpoint runs, nothing is downloaded."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    config.use_cache = False
    return config


def build_tree(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The modules, all of whose tensors are on the device `meta`: they have shapes and types, and no memory."""
    with torch.device("meta"), meta_device_safe_creation_ops():
        tree: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=EXPERTS,
            trust_remote_code=False,
        )
    _widen(tree, dtype)
    tree.eval()
    return tree


def _widen(tree: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the tensors that transformers loads in float32 beside weights of `dtype` that type, as biases of routers.

    Rounded to bfloat16, such a bias chooses other experts.
    """
    if not (kept := tree._get_dtype_plan(dtype)):
        return
    pattern, _, _ = build_glob_alternation(list(kept))
    for name, tensor in (*tree.named_parameters(), *tree.named_buffers()):
        if pattern.search(name):
            tensor.data = tensor.data.float()


def set_attention(tree: PreTrainedModel, attention: str) -> None:
    """Let the modules attend by another function."""
    tree.config._attn_implementation = attention


def set_attend(module: torch.nn.Module, attend: Attend) -> None:
    """Let a module attend by `attend`, if the tree's attention is `PAGED` or `TRACED`."""
    module.multilora_attend = attend  # type: ignore[assignment]


def set_experts(module: torch.nn.Module, function: Callable[..., torch.Tensor]) -> None:
    """Let a module of experts compute by a function of its input, the chosen experts and their weights."""
    module.multilora_experts = function  # type: ignore[assignment]


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is all experts of a layer, called by transformers' interface for experts."""
    return hasattr(module, "_is_expert_parallel")


def are_plain_experts(module: Any) -> bool:
    """Whether each expert is down(silu(gate(x)) * up(x)) with the rows of gate before those of up, and no biases."""
    return (
        bool(module.has_gate and module.is_concatenated)
        and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
        and type(module)._apply_gate is _default_apply_gate
        and isinstance(module.act_fn, torch.nn.SiLU | SiLUActivation)
    )


def pattern_of(mask: Any) -> MaskPattern | None:
    """The pattern of a mask that the attention of a traced module got; None for another mask, or none."""
    return getattr(mask, "multilora_pattern", None)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    attend: Any = module.multilora_attend
    return attend(query, key, value, attention_mask, **options), None


def _experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    function: Any = module.multilora_experts
    y: torch.Tensor = function(hidden_states, top_k_index, top_k_weights)
    return y


def _traced_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskPattern, **_options: Any
) -> torch.Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, device="meta")
    mask.multilora_pattern = mask_function  # type: ignore[attr-defined]
    return mask


for _name in (PAGED, TRACED):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, _traced_mask)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
