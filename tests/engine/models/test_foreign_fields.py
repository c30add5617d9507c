"""Fields of config.json that mean something to some families only: each has what transformers' layers make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from multilora_engine.errors import ConfigError
from multilora_engine.models.loader import load_model
from multilora_engine.models.registry import FAMILIES, read_model_config
from multilora_engine.models.weights import Placement

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rope_theta": 5e4,
    "sliding_window": 64,
    "eos_token_id": [2, 101, -1],
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CHANGES: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 7},
    "windows in some layers": {"sliding_window": 7, "layer_types": MIXED},
    "windows that are switched off": {"sliding_window": 7, "layer_types": MIXED, "use_sliding_window": False},
    "rms_norm_eps": {"rms_norm_eps": 0.5},
    "layer_norm_eps": {"layer_norm_eps": 0.5},
    "norm_epsilon": {"norm_epsilon": 0.5},
    "hidden_act": {"hidden_act": "silu"},
    "hidden_act of another kind": {"hidden_act": "gelu_pytorch_tanh"},
    "hidden_activation": {"hidden_activation": "silu"},
    "biases": {"attention_bias": True, "mlp_bias": True, "use_bias": True},
    "no biases": {"attention_bias": False, "mlp_bias": False, "use_bias": False},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "yarn and an original length": {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "yarn and two original lengths": {
        "rope_scaling": YARN | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32,
    },
    "llama3 and an original length": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
}
MIXTURES = ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM")
REFUSED = {(name, "hidden_act of another kind"): "is not supported for experts" for name in MIXTURES} | {
    # Transformers makes a window of 0 of it, which PyTorch's attention refuses.
    ("Qwen2MoeForCausalLM", change): "sliding_window .* must be positive"
    for change in ("windows in some layers", "windows that are switched off")
}
"""Files that transformers reads."""
NUM_TOKENS = 40


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_layers_read_the_fields_that_they_read_in_transformers(
    name: str, tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    tokens = torch.randint(0, SHAPE["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))
    refused = []
    for place, (change, fields) in enumerate(CHANGES.items()):
        path = tmp_path / str(place)
        expected = by_transformers(path, raw_config(name) | fields, tokens)
        if expected is None:
            refused.append(change)
            continue
        if (name, change) in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name, change]):
                read_model_config(path)
            continue
        loaded = load_model(path, Placement(torch.float32, torch.float32, torch.device("cpu")))
        (logits,) = paged_runner(loaded).step([(paged_sequence(tokens.tolist()), NUM_TOKENS)])
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4, msg=lambda text, of=change: f"{of}: {text}")
        assert loaded.config.end_token_ids == (2,)
    assert len(refused) < 4, refused


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_looks_ahead_is_refused(name: str, tmp_path: Path) -> None:
    by_transformers(tmp_path, raw_config(name) | {"is_causal": False}, torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="is_causal false is not supported"):
        load_model(tmp_path, Placement(torch.float32, torch.float32, torch.device("cpu")))


def raw_config(name: str) -> dict[str, Any]:
    return {"architectures": [name], "model_type": FAMILIES[name].model_type, **SHAPE}


def by_transformers(path: Path, raw: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits of random weights, saved beside the config as it stands; None where transformers refuses that."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.inference_mode():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.normal_(1.0, 0.3)
            logits: torch.Tensor = model(tokens[None], use_cache=False).logits[0]
    except Exception:  # its refusals have many types
        return None
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, path / "model.safetensors")
    return logits
