"""Quantised checkpoints that the compressed-tensors library makes of a transformers model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedModel

from checkpoints.tiny_llama import save_tiny_llama

SCALES = re.compile(r"weight_(scale|zero_point)")
_W4A16 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}


def save_tiny_w4a16(path: Path, **options: Any) -> Path:
    """A tiny Llama in w4a16, asymmetric, in groups of 32, but for its head. options: of `save_tiny_llama`."""
    model = LlamaForCausalLM.from_pretrained(save_tiny_llama(path / "floats", **{"intermediate_size": 64} | options))
    groups = {"group_0": {"targets": ["Linear"], "weights": _W4A16}}
    save_compressed(model, path / "codes", groups, ignore=["lm_head"])
    return path / "codes"


def save_compressed(model: PreTrainedModel, path: Path, groups: dict[str, Any], **options: Any) -> None:
    """Quantise `model` by the nearest codes and save it; afterwards its weights are those of the codes, as floats.

    groups: `config_groups`. options: others of the library's QuantizationConfig.
    """
    config = QuantizationConfig(config_groups=groups, quantization_status=QuantizationStatus.INITIALIZED, **options)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    path.mkdir(exist_ok=True, parents=True)
    # Clones: a file has no tensors that share memory.
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("lm_head.")}
    save_file(state, path / "model.safetensors")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    compressor.update_config(path)
    compressor.decompress_model(model)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.quantization_enabled = False


def _set_scales(module: torch.nn.Module) -> None:
    args, weight = module.quantization_scheme.weights, module.weight.data
    blocks = _blocks(weight, args)
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        zeros = module.weight_zero_point
        zeros.data = zero_point.reshape(zeros.shape).to(zeros.dtype)


def _blocks(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """The values that share a scale in the last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight[:, None]
    if args.strategy == "group":
        return weight.unflatten(1, (-1, args.group_size))
    rows, columns = args.block_structure
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).permute(0, 2, 1, 3).flatten(2)


def change_config(path: Path, **changes: Any) -> None:
    """Set keys of `quantization_config`."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
