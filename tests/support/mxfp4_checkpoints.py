"""gpt-oss with experts in MXFP4, as its released files are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from checkpoints.tiny_llama import VOCAB_SIZE

WEIGHTS = "model.safetensors"
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save_tiny_mxfp4(path: Path) -> Path:
    """Write the checkpoint of a gpt-oss of a few thousand random parameters. No end token."""
    torch.manual_seed(7)
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=20,
        max_position_embeddings=512,
        initializer_range=0.4,
    )
    save_mxfp4(GptOssForCausalLM(config), path)
    return path


def save_mxfp4(model: GptOssForCausalLM, path: Path) -> None:
    """Save the model with the nearest codes. Afterwards its weights are those of the codes, by transformers."""
    model.save_pretrained(path)
    tensors = load_file(path / WEIGHTS)
    for name, parameter in model.named_parameters():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            blocks, scales = to_mxfp4(tensors.pop(name).mT)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, path / WEIGHTS)
    written = json.loads((path / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (path / "config.json").write_text(json.dumps(written))


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [experts, outputs, inputs]. Returns blocks [experts, outputs, groups, 16] and scales, both uint8."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    steps = groups / exponents.exp2()[..., None]
    codes = (steps[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
