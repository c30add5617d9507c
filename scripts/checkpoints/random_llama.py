"""A Llama of any size with random weights in bfloat16, in several files: for speed alone, and quickly written.

All layers have the same numbers, which repeat. Each token is one character, so that a text of random characters has a
known length, and no two of them share a prefix.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import TensorSpec, serialize_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from multilora_engine.models.model_config import ModelConfig

_STD = 0.02
_NUM_DRAWN = (1 << 20) + 7
_LAYERS_A_FILE = 4
_FIRST_CHARACTER, _SURROGATES = 0x100, range(0xD800, 0xE000)


def character_of(token: int) -> str:
    """The text of a token."""
    code = _FIRST_CHARACTER + token
    return chr(code + len(_SURROGATES) if code >= _SURROGATES.start else code)


def token_of(character: str) -> int:
    """The token of a text of one character."""
    code = ord(character)
    return code - _FIRST_CHARACTER - (len(_SURROGATES) if code >= _SURROGATES.stop else 0)


def save_random_llama(path: Path, shape: ModelConfig, num_layers: int) -> Path:
    """Write a checkpoint with so many layers of a shape, and its tokenizer. No end token."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path)
    _save_tokenizer(path, shape.vocab_size)
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (shape.q_size, hidden),
        "self_attn.k_proj.weight": (shape.kv_size, hidden),
        "self_attn.v_proj.weight": (shape.kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, shape.q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    layer = {name: _tensor(each) for name, each in shapes.items()}
    table = _tensor((shape.vocab_size, hidden))
    files = [{"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": _tensor((hidden,))}]
    for first in range(0, num_layers, _LAYERS_A_FILE):
        numbers = range(first, min(first + _LAYERS_A_FILE, num_layers))
        files.append({f"model.layers.{n}.{name}": tensor for n in numbers for name, tensor in layer.items()})
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        # Not `save_file`, which refuses one tensor under several names.
        serialize_file({name: _spec(tensor) for name, tensor in tensors.items()}, path / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def _tensor(shape: tuple[int, ...]) -> torch.Tensor:
    """A million random numbers, again and again; ones for norms. Drawing all of them would take most of the time."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    numbers = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0)).mul_(_STD).bfloat16()
    size = math.prod(shape)
    return numbers.repeat(-(-size // _NUM_DRAWN))[:size].view(shape)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(dtype="bfloat16", shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    vocab = {character_of(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=character_of(0)))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
