"""Linears as AutoGPTQ and AutoAWQ write them, packed value by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""AutoAWQ's `WQLinear_GEMM.from_linear`: nibble i of a word holds its output AWQ_ORDER[i]."""


@dataclass
class Codes:
    """w[o, i] = scales[group[i], o] * (codes[i, o] - zeros[group[i], o]), all integers below 2 ** bits."""

    bits: int
    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group: torch.Tensor

    def weight(self) -> torch.Tensor:
        """[out, in] float32."""
        steps = self.codes - self.zeros[self.group]
        return (self.scales.float()[self.group] * steps).T.contiguous()


def quantized(
    weight: torch.Tensor, bits: int, group_size: int, *, act_order: bool = False, symmetric: bool = False, seed: int = 0
) -> Codes:
    """Nearest codes of a weight [out, in], with float16 scales. act_order: inputs in groups of a random order."""
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    group = torch.arange(in_features) // size
    if act_order:
        group = group[torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))]
    num_groups, top = -(-in_features // size), 2**bits - 1
    zeros, scales = torch.empty(num_groups, out_features, dtype=torch.long), torch.empty(num_groups, out_features)
    for g in range(num_groups):
        values = weight[:, group == g]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[g] = ((high - low) / top).half().float().clamp(min=1e-4)
        zeros[g] = 2 ** (bits - 1) if symmetric else torch.round(-low / scales[g]).clamp(0, top)
    scales = scales.half()
    steps = torch.round(weight.T / scales.float()[group]).long() + zeros[group]
    return Codes(bits, steps.clamp(0, top), zeros, scales, group)


def gptq_tensors(codes: Codes, version: int = 1) -> dict[str, torch.Tensor]:
    """By the names after a linear's. Version 1 stores zeros less one, modulo 2 ** bits."""
    zeros = (codes.zeros - (2 - version)) % 2**codes.bits
    return {
        "qweight": words(codes.codes.T, codes.bits).T.contiguous(),
        "qzeros": words(zeros, codes.bits),
        "scales": codes.scales,
        "g_idx": codes.group.to(torch.int32),
    }


def awq_tensors(codes: Codes) -> dict[str, torch.Tensor]:
    """By the names after a linear's; the outputs must be a multiple of 8."""
    return {
        "qweight": words(_interleaved(codes.codes), 4),
        "qzeros": words(_interleaved(codes.zeros), 4),
        "scales": codes.scales,
    }


def fp8_tensors(weight: torch.Tensor, block: list[int] | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As fine-grained FP8 stores a weight [out, in], by the names after a linear's; and the weight as floats.

    block: outputs and inputs that share a scale; None: all of the weight.
    """
    rows, columns = block or weight.shape
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    scales = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    stored = {"weight_scale_inv": scales} if block else {"weight_scale": scales.reshape(())}
    return {"weight": codes, **stored}, codes.float() * spread


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of integers as one long integer each, the first value lowest, cut into int32."""
    num_words = -(-values.shape[1] * bits // 32)
    rows = []
    for row in values.tolist():
        stream = sum(value << index * bits for index, value in enumerate(row))
        rows.append([stream >> 32 * word & 0xFFFFFFFF for word in range(num_words)])
    unsigned = torch.tensor(rows, dtype=torch.int64)
    return torch.where(unsigned < 2**31, unsigned, unsigned - 2**32).to(torch.int32)


def save_linears(
    path: Path,
    model: PreTrainedModel | torch.nn.Module,
    config: dict[str, Any],
    store: Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor] | None],
) -> None:
    """Save `model` with each linear as `store` says: its tensors and its weight as floats, or None to leave it."""
    model.save_pretrained(path)
    tensors = load_file(path / WEIGHTS)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if (stored := store(name, module.weight.detach())) is not None:
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored[0].items()}
            module.weight.data = stored[1]
    save_file(tensors, path / WEIGHTS)
    written = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(written))


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, "desc_act": False, **more}


def stays_float(name: str) -> bool:
    """Whether tools leave a linear as it is: the head, and routers of mixtures."""
    return name == "lm_head" or name.endswith("gate")


def in_layers(codes: Callable[[str, torch.Tensor], Codes], pack: Callable[[Codes], dict[str, torch.Tensor]]) -> Any:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if stays_float(name):
            return None
        found = codes(name, weight)
        return pack(found), found.weight()

    return store
