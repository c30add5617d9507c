"""gpt-oss with experts in MXFP4 holds the numbers that transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loaded_weights import load
from support.mxfp4_checkpoints import WEIGHTS, save_mxfp4
from transformers import GptOssConfig, GptOssForCausalLM

from multilora_engine.errors import ConfigError

SHAPE = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
EXPERTS = "model.layers.1.mlp.experts"
NUM_TOKENS = 40


def save(path: Path) -> GptOssForCausalLM:
    torch.manual_seed(11)
    model = GptOssForCausalLM(GptOssConfig(**SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.normal_(1.0, 0.3)
    save_mxfp4(model, path)
    return model


def change(path: Path, name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace one tensor of a layer's experts, or leave it out."""
    tensors = load_file(path / WEIGHTS)
    changed = new(tensors.pop(f"{EXPERTS}.{name}"))
    more = {} if changed is None else {f"{EXPERTS}.{name}": changed.contiguous()}
    save_file(tensors | more, path / WEIGHTS)


def test_weights_and_logits_are_those_of_transformers(
    tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    model = save(tmp_path)
    loaded = load(tmp_path)
    for layer, expected in zip(loaded.layers, model.model.layers, strict=True):
        for expert in range(SHAPE["num_local_experts"]):
            gate_up, down = (getattr(expected.mlp.experts, name)[expert].T for name in ("gate_up_proj", "down_proj"))
            rows = layer.mlp._gate_up.weight.expert(expert).rows(0, 2 * SHAPE["intermediate_size"])
            assert torch.equal(rows, torch.cat((gate_up[0::2], gate_up[1::2])))
            assert torch.equal(layer.mlp._down.weight.expert(expert).rows(0, SHAPE["hidden_size"]), down)
    assert {"int8 in groups of 32", "float32"} == set(loaded.weight_bytes)
    tokens = torch.randint(0, SHAPE["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))
    (logits,) = paged_runner(loaded).step([(paged_sequence(tokens.tolist()), NUM_TOKENS)])
    with torch.inference_mode():
        expected = model(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("down_proj_scales", lambda _: None, "tensor model.layers.1.mlp.experts.down_proj_scales is missing"),
        ("gate_up_proj_blocks", lambda t: t[:4], r"gate_up_proj_blocks is U8 \[4, 192, 2, 16\].*U8 \[5, 192, 2, 16\]"),
        ("gate_up_proj_blocks", lambda t: t.to(torch.int32), "gate_up_proj_blocks is I32 "),
        (
            "down_proj_scales",
            lambda t: torch.cat((t[:3], torch.full_like(t[3:], 255))),
            "down_proj of expert 3: scales holds 192 NaN",
        ),
        ("gate_up_proj_bias", lambda t: t[:, :-1], r"gate_up_proj_bias has shape \[5, 191\]"),
    ],
)
def test_tensors_that_are_wrong_are_refused_by_name(
    name: str, new: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    save(tmp_path)
    change(tmp_path, name, new)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
