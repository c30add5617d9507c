"""LoRA adapters in GGUF, as llama.cpp's `convert_lora_to_gguf.py` writes them, as PEFT's two files.

`GGUFAdapter` is the bytes of an `adapter_model.safetensors` that nobody has written: its header, and then the tensors,
which are read from the GGUF file as they are asked for. `peft_files` reads and checks all of it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multilora_wire.checkpoint_directory import CONFIG_FILE
from multilora_wire.gguf.blocks import TYPES, dequantize
from multilora_wire.gguf.file import GGUF_MAGIC, GGUFFile, read_gguf
from multilora_wire.gguf.names import ARCHITECTURES, TensorNames, row_order
from multilora_wire.messages import shown
from multilora_wire.peft_config import PeftError, quoted
from multilora_wire.peft_files import PeftAdapter, read_peft
from multilora_wire.sites import ModelSites
from multilora_wire.tensor_file import ByteSource, TensorFileError, TensorPlace

_MAX_HEADER_BYTES = 4 << 20
_ENDINGS = {".lora_a": "lora_A", ".lora_b": "lora_B"}
_EMBEDDINGS = "model.embed_tokens"
_ALPHA, _TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_WITHOUT_EFFECT = frozenset({"adapter.lora.task_name", "adapter.lora.prompt_prefix"})
"""For people: llama.cpp applies neither."""

_MODEL_TYPES = {"llama": ("llama", "mistral"), "gemma3": ("gemma3_text",)}
"""`model_type` of config.json by GGUF's architectures, where it has another name."""


@dataclass(frozen=True)
class BaseModel:
    """The model that an adapter comes on top of. head_dim: of its attention; 0 where its config.json does not tell."""

    model_type: str
    head_dim: int

    @classmethod
    def of(cls, directory: Path) -> BaseModel:
        """The model of a checkpoint directory that a server serves."""
        fields = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        # Models to which no GGUF adapter belongs have other names for these, as GPT-2.
        head_dim = fields.get("head_dim") or fields.get("hidden_size", 0) // fields.get("num_attention_heads", 1)
        return cls(fields["model_type"], head_dim)


@dataclass(frozen=True)
class _Tensor:
    """A tensor as PEFT has it. place: in the GGUF file. num_heads: whose rows are exchanged, 0 for none."""

    name: str
    place: TensorPlace
    shape: tuple[int, int]
    num_heads: int = 0
    is_transposed: bool = False

    @property
    def is_stored_so(self) -> bool:
        """Whether the bytes in the file are those of the tensor."""
        return not (self.num_heads or self.is_transposed or TYPES[self.place.dtype].is_quantized)

    @property
    def dtype(self) -> str:
        """Safetensors' name of the type."""
        return "F32" if TYPES[self.place.dtype].is_quantized else self.place.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)


NO_CONFIG = b"{}"
"""Sent in the place of `adapter_config.json` beside a GGUF file, which has its own."""


def is_gguf(start: bytes | memoryview) -> bool:
    """Whether a file that begins so is GGUF."""
    return bytes(start[: len(GGUF_MAGIC)]) == GGUF_MAGIC


def read_gguf_adapter(source: ByteSource, base_model: Path, sites: ModelSites) -> PeftAdapter:
    """`read_peft` of a GGUF file. base_model: the checkpoint directory of the model, which has these sites.

    Raises PeftError, or WrongBaseModel.
    """
    adapter = GGUFAdapter(source, BaseModel.of(base_model))
    return read_peft(adapter.config, adapter, sites, base_model.name)


class GGUFAdapter:
    """config: the bytes of `adapter_config.json`. The object itself is the `ByteSource` of the weights' file."""

    def __init__(self, source: ByteSource, base: BaseModel) -> None:
        """Reads the header, and no values. Raises PeftError, which names key or tensor."""
        try:
            file = read_gguf(source, _MAX_HEADER_BYTES)
        except TensorFileError as error:
            raise PeftError(f"the GGUF file: {error}") from None
        names = _check_metadata(file, base)
        self._source = source
        self._tensors = [_read_tensor(place, names, base.head_dim) for place in file.tensors.values()]
        if not self._tensors:
            raise PeftError("the GGUF file has no tensors")
        self.config = _config(file.metadata, self._tensors)
        self._header, self._starts = self._layout()
        self._changed: tuple[int, bytes] = (-1, b"")

    @property
    def num_bytes(self) -> int:
        return self._starts[-1] + self._tensors[-1].num_bytes

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from `start` up to `stop`, which no two tensors share. Raises TensorFileError."""
        if stop <= len(self._header):
            return self._header[start:stop]
        index = bisect_right(self._starts, start) - 1
        first, tensor = self._starts[index], self._tensors[index]
        assert first <= start, "a piece begins in the header, and goes on"
        if tensor.is_stored_so:
            return self._source.read(tensor.place.start + start - first, tensor.place.start + stop - first)
        if self._changed[0] != index:
            self._changed = index, self._read_changed(tensor)
        return self._changed[1][start - first : stop - first]

    def _read_changed(self, tensor: _Tensor) -> bytes:
        place, kind = tensor.place, TYPES[tensor.place.dtype]
        data = np.frombuffer(self._source.read(place.start, place.stop), np.uint8)
        rows = data.reshape(place.shape[0], -1)
        values: Any = dequantize(kind, rows) if kind.is_quantized else rows.view(f"u{kind.num_bytes}")
        if tensor.num_heads:
            values = values[row_order(len(values), tensor.num_heads)]
        return np.ascontiguousarray(values.T if tensor.is_transposed else values).tobytes()

    def _layout(self) -> tuple[bytes, list[int]]:
        """The header of safetensors, and the bytes at which the tensors begin."""
        entries, end = {}, 0
        ends = []
        for tensor in self._tensors:
            offsets = [end, end := end + tensor.num_bytes]
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            ends.append(offsets[0])
        if len(entries) < len(self._tensors):
            twice = next(name for name, count in Counter(one.name for one in self._tensors).items() if count > 1)
            raise PeftError(f"the GGUF file has {twice} under two names")
        text = json.dumps(entries).encode()
        header = len(text).to_bytes(8, "little") + text
        return header, [len(header) + start for start in ends]


def _check_metadata(file: GGUFFile, base: BaseModel) -> TensorNames:
    metadata = file.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != expected:
            raise PeftError(f"{key} is {quoted(metadata.get(key))}, and {expected!r} is expected")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise PeftError(
            f"general.architecture {quoted(architecture)} is not supported; supported are: {', '.join(ARCHITECTURES)}"
        )
    if base.model_type not in (allowed := _MODEL_TYPES.get(architecture, (architecture,))):
        raise PeftError(
            f"general.architecture {architecture!r} is that of {' or '.join(allowed)}, and the model here is "
            f"{base.model_type}"
        )
    for key, value in metadata.items():
        if key.startswith("adapter.") and key not in {"adapter.type", _ALPHA, _TOKENS, *_WITHOUT_EFFECT}:
            raise PeftError(f"{shown(key)} {quoted(value)} is not supported: nobody here knows this key")
    return ARCHITECTURES[architecture]


def _read_tensor(place: TensorPlace, names: TensorNames, head_dim: int) -> _Tensor:
    key = shown(place.key)
    ending = next((one for one in _ENDINGS if place.key.endswith(one)), None)
    weight = None if ending is None else names.hugging_face(place.key.removesuffix(ending))
    if ending is None or weight is None or not weight.endswith(".weight"):
        raise PeftError(f"{key} is no LoRA matrix of a linear (NAME.weight.lora_a and NAME.weight.lora_b)")
    if len(place.shape) != 2:
        raise PeftError(f"{key} has shape {list(place.shape)}; a matrix is expected")
    module, shape = weight.removesuffix(".weight"), (place.shape[0], place.shape[1])
    if module == _EMBEDDINGS:
        name, is_transposed = f"lora_embedding_{_ENDINGS[ending][-1]}", ending == ".lora_a"
        if is_transposed and TYPES[place.dtype].is_quantized:
            raise PeftError(f"{key} is {place.dtype}; the A of embeddings is read as floats only")
        return _Tensor(
            f"base_model.model.{module}.{name}", place, shape[::-1] if is_transposed else shape, 0, is_transposed
        )
    num_heads = 0
    if ending == ".lora_b" and names.heads_of_rows(weight, 1, 1):
        if not head_dim:
            raise PeftError(f"{key} cannot be read: config.json of the base model has no head_dim")
        if shape[0] % head_dim:
            raise PeftError(f"{key} has {shape[0]} rows, and a head of this model has {head_dim}")
        num_heads = shape[0] // head_dim
    return _Tensor(f"base_model.model.{module}.{_ENDINGS[ending]}.weight", place, shape, num_heads)


def _config(metadata: Mapping[str, Any], tensors: list[_Tensor]) -> bytes:
    alpha = metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise PeftError(f"{_ALPHA} is {quoted(alpha)}, and a number is expected")
    ranks = {
        tensor.name.removeprefix("base_model.model.").partition(".lora_")[0]: tensor.shape[0]
        for tensor in tensors
        if "lora_A" in tensor.name or "embedding_A" in tensor.name
    }
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {module: one for module, one in ranks.items() if one != rank}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha or rank,  # llama.cpp scales by alpha / rank, and by 1 without an alpha.
        "rank_pattern": others,
        "alpha_pattern": {} if alpha else others,
    }
    if (tokens := metadata.get(_TOKENS)) is not None:
        config["alora_invocation_tokens"] = tokens
    if isinstance(name := metadata.get("general.base_model.0.name"), str):
        config["base_model_name_or_path"] = name
    return json.dumps(config).encode()
