"""GGUF files of small models: what llama.cpp's `convert_hf_to_gguf.py` writes, by the `gguf` package's writer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from transformers import PreTrainedModel

Array = npt.NDArray[Any]

K_TYPES = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
"""Types that the package only reads: their blocks are random."""

PERMUTED = ("llama", "granite", "smollm3")
TOKEN_TYPES = gguf.TokenType


def byte_tokens(count: int) -> list[str]:
    """The 256 tokens of single bytes, one of two, then others."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = dict(zip(visible, map(chr, visible), strict=True)) | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
    return [names[byte] for byte in range(256)] + ["ab"] + [f"<extra {i}>" for i in range(count - 257)]


def write_model(
    path: Path,
    model: PreTrainedModel,
    types: Callable[[str], Type] = lambda _: Type.F32,
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    seed: int = 0,
    split: int = 0,
) -> None:
    """Write a model, whose weights are those of the file afterwards.

    types: of matrices, by their names in the model. metadata: other keys, or other values of keys. split: the most
    tensors of one file.
    """
    config = model.config
    architecture = architecture or {"gemma3_text": "gemma3", "mistral": "llama"}.get(
        config.model_type, config.model_type
    )
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in (
        {**keys_of(config, architecture), **tokenizer_keys(config.vocab_size)} | (metadata or {})
    ).items():
        add_value(writer, key, value)
    random = np.random.default_rng(seed)
    names = gguf.get_tensor_name_map(arch_of(architecture), config.num_hidden_layers)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stored = names.get_name(name, (".weight", ".bias"))
            assert stored is not None, name
            kind = types(name) if tensor.dim() == 2 else Type.F32
            values, restored = stored_values(name, tensor.float().numpy(), kind, architecture, config, random)
            writer.add_tensor(stored, values, raw_dtype=kind)
            tensor.copy_(torch.from_numpy(restored))
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_values(
    name: str, values: Array, kind: Type, architecture: str, config: Any, random: np.random.Generator
) -> tuple[Array, Array]:
    """A tensor as the file has it, and the values that it has then in the model."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        added = values + np.float32(1)
        return added, added - np.float32(1)
    order = np.arange(len(values))
    if architecture in PERMUTED and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        # `LlamaModel.permute` of the converter.
        order = order.reshape(heads, 2, len(values) // heads // 2).swapaxes(1, 2).reshape(-1)
    stored = quantized(values[order], kind, random)
    restored = np.empty_like(values)
    restored[order] = gguf.dequantize(stored, kind).reshape(values.shape)
    return stored, restored


def quantized(values: Array, kind: Type, random: np.random.Generator) -> Array:
    """Values as a type has them; random ones for `K_TYPES`."""
    if kind not in K_TYPES:
        return gguf.quantize(values, kind)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (values.size // block, num_bytes), np.uint8)
    size = float(values.std()) / {Type.Q4_K: 150, Type.Q5_K: 300, Type.Q6_K: 1100}[kind]
    halves = random.uniform(0.5 * size, 1.5 * size, (len(blocks), 2)).astype(np.float16)
    if kind == Type.Q6_K:
        blocks[:, -2:] = halves[:, :1].view(np.uint8)
    else:
        halves[:, 1] *= 7.5 if kind == Type.Q4_K else 15.5  # As many values above zero as below.
        blocks[:, :4] = halves.view(np.uint8)
        # Some groups of nothing but their minimum.
        blocks[random.random(len(blocks)) < 0.1, 4] = 0
    return blocks.reshape(len(values), -1)


def arch_of(architecture: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def keys_of(config: Any, architecture: str) -> dict[str, Any]:
    """The metadata of the model's shape, as the converter writes it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.vocab_size,
    }
    if architecture in ("cohere2", "starcoder2"):
        keys["attention.layer_norm_epsilon"] = float(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    else:
        keys["attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if original := rope.get("original_max_position_embeddings"):
        keys["rope.scaling.original_context_length"] = original
    if config.model_type == "phi3" and rope["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / original
        keys["rope.scaling.attn_factor"] = (
            float(np.sqrt(1 + np.log(stretch) / np.log(original))) if stretch > 1 else 1.0
        )
    if architecture == "granite":
        keys |= {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    if architecture == "cohere2":
        keys["logit_scale"] = float(config.logit_scale)
    if architecture in ("gemma2", "gemma3", "cohere2") or (architecture == "phi3" and config.sliding_window):
        keys["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        keys |= {
            "attn_logit_softcapping": float(config.attn_logit_softcapping),
            "final_logit_softcapping": float(config.final_logit_softcapping),
        }
    if architecture == "gemma3":
        keys["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def tokenizer_keys(vocab_size: int) -> dict[str, Any]:
    """A byte-level vocabulary with one merge. The last token ends answers."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": byte_tokens(vocab_size),
        "tokenizer.ggml.token_type": [TOKEN_TYPES.NORMAL] * 257 + [TOKEN_TYPES.CONTROL] * (vocab_size - 257),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": vocab_size - 1,
    }


def rope_factors(config: Any) -> dict[str, Sequence[float]]:
    """The tensors of factors of rotary embeddings. Of Llama 3 the converter's own formula."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def write_adapter(path: Path, directory: Path, config: Any, kind: Type = Type.F32, **metadata: Any) -> None:
    """Write PEFT's adapter in `directory` as `convert_lora_to_gguf.py` does. config: of the base model."""
    settings = json.loads((directory / "adapter_config.json").read_text())
    architecture = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    for key, value in (
        {"adapter.type": "lora", "adapter.lora.alpha": float(settings["lora_alpha"])} | metadata
    ).items():
        add_value(writer, key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(arch_of(architecture), config.num_hidden_layers)
    for key, values in load_file(directory / "adapter_model.safetensors").items():
        if "base_layer" in key:
            continue
        module, _, side = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        stored = names.get_name(module)
        assert stored is not None, key
        ending = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b"}[
            side
        ]
        if side == "lora_B":
            values, _ = stored_values(
                f"{module}.weight", values, Type.F32, architecture, config, np.random.default_rng(0)
            )
        values = np.ascontiguousarray(values.T if side == "lora_embedding_A" else values)
        fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        used = kind if fits else Type.F16
        writer.add_tensor(f"{stored}.weight.{ending}", gguf.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
