"""`SentAdapter`: an adapter that came with a request, not packed yet.

It comes as TensorRT-LLM's tensors (`lora_config` with weights of one dtype), or as PEFT's files as they are
(`lora_peft_config` and `lora_peft_weights`). With either, `lora_use` may have the files on its use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.layout import AdapterTraits, PackedAdapter
from multilora_engine.lora.names import DIGEST_FORM, SetMember, checked_members, is_digest, set_task_id, task_id_of
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.adapter_use import MAX_SENT_BYTES, UseError, split_use_files
from multilora_wire.gguf.adapter import NO_CONFIG, is_gguf, read_gguf_adapter
from multilora_wire.layout import AdapterLayout
from multilora_wire.peft_config import PeftError, check_config_bytes
from multilora_wire.peft_files import PeftAdapter, read_peft
from multilora_wire.tensor_file import MemoryBytes

if TYPE_CHECKING:
    import torch

_WEIGHTS = ("lora_weights", "lora_weights_bf16", "lora_weights_fp32")
_FILES = ("lora_peft_config", "lora_peft_weights")
_USE = "lora_use"


@dataclass(frozen=True, eq=False)
class SentAdapter(ABC):
    """An adapter of a request. It shares the memory of the request, which lives as long as the adapter.

    layout: the engine's. read_use: reads the files on the adapter's use, `AdapterTraits.use`; its argument is whether
    the adapter has rows of tokens. It may raise InvalidRequest.
    """

    lora_task_id: int
    layout: AdapterLayout
    read_use: Callable[[bool], str] = field(default=lambda has_rows: "", kw_only=True)

    @abstractmethod
    def pack(self) -> PackedAdapter:
        """Check and copy the weights, which takes a second a GiB. Raises InvalidRequest."""


@dataclass(frozen=True, eq=False)
class SentTensors(SentAdapter):
    """weights: [rows, width], float16, bfloat16 or float32. config: [rows, 3 or 4], int32."""

    weights: torch.Tensor
    config: torch.Tensor

    def pack(self) -> PackedAdapter:
        # Here only: it imports torch, seconds and 140 MB that a front without uploads does without.
        from multilora_engine.lora.format import pack_adapter

        return pack_adapter(self.weights, self.config, self.layout, AdapterTraits(use=self.read_use(False)))


@dataclass(frozen=True, eq=False)
class SentFiles(SentAdapter):
    """config, weights: the bytes of PEFT's files. base_model: the checkpoint, which DoRA refers to.

    max_bytes: of the weights, with all zeros that the file leaves out.
    """

    config: bytes
    weights: memoryview
    base_model: Path
    max_bytes: int

    def pack(self) -> PackedAdapter:
        from multilora_engine.lora.format import pack_peft

        try:
            adapter = self._read()
        except (PeftError, WrongBaseModel) as error:
            raise InvalidRequest(str(error)) from None
        self._check_size(adapter)
        return pack_peft(adapter, self.layout, self.base_model, self.read_use(bool(adapter.rows)))

    def _read(self) -> PeftAdapter:
        source, sites = MemoryBytes(self.weights), self.layout.sites
        if not is_gguf(self.weights):
            return read_peft(self.config, source, sites, self.base_model.name)
        if self.config.strip() != NO_CONFIG:
            raise PeftError("lora_peft_weights is GGUF, which has its own settings: send {} as lora_peft_config")
        return read_gguf_adapter(source, self.base_model, sites)

    def _check_size(self, adapter: PeftAdapter) -> None:
        """Block-diagonal matrices are larger than their files."""
        if adapter.num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"the matrices of lora_peft_weights have {adapter.num_bytes} bytes and lora_max_adapter_bytes is "
                f"{self.max_bytes}"
            )


def read_adapter(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> SentAdapter:
    """The adapter of a request that has weights. tokenizer: the base model's. Raises InvalidRequest."""
    task_id = read_task_id(inputs, 0)
    assert task_id is not None, "checked before"
    layout, read_use = info.adapter_layout, _read_use(inputs, info, tokenizer)
    if not inputs.present(*_FILES):
        weights, rows = _read_tensor(inputs, info), inputs.matrix("lora_config")
        return SentTensors(task_id, layout, weights, rows, read_use=read_use)
    config = inputs.scalar("lora_peft_config", 0)
    try:
        check_config_bytes(len(config))
    except PeftError as error:
        raise InvalidRequest(str(error)) from None
    file, base_model = _read_file(inputs, info), Path(info.model_path)
    return SentFiles(task_id, layout, config, file, base_model, info.max_adapter_bytes, read_use=read_use)


def _read_use(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> Callable[[bool], str]:
    content = inputs.scalar(_USE, 0)
    if content is None:
        return lambda has_rows: ""
    if len(content) > MAX_SENT_BYTES:
        raise InvalidRequest(f"{_USE} has {len(content)} bytes, at most {MAX_SENT_BYTES} are read")
    try:
        files = split_use_files(content)
    except UseError as error:
        raise InvalidRequest(f"{_USE}: {error}") from None
    reader = UseReader(tokenizer, Path(info.model_path), info.vocab_size)
    return partial(reader.read, files)


def weights_bytes(inputs: InputTensors, info: EngineInfo) -> int:
    """The bytes of the weights that a request has, with the padding of tensors. Raises InvalidRequest."""
    return _read_file(inputs, info).nbytes if _FILES[1] in inputs else _read_tensor(inputs, info).nbytes


def _read_tensor(inputs: InputTensors, info: EngineInfo) -> torch.Tensor:
    weights = inputs.matrix(inputs.present(*_WEIGHTS)[0])
    _check_bytes("lora_weights", weights.nbytes, info)
    return weights


def _read_file(inputs: InputTensors, info: EngineInfo) -> memoryview:
    weights = inputs.row_of_bytes(_FILES[1])
    _check_bytes(_FILES[1], weights.nbytes, info)
    return weights


def _check_bytes(name: str, num_bytes: int, info: EngineInfo) -> None:
    if num_bytes > info.max_adapter_bytes:
        raise InvalidRequest(f"{name} has {num_bytes} bytes and lora_max_adapter_bytes is {info.max_adapter_bytes}")


def has_weights(inputs: InputTensors) -> bool:
    """Whether an adapter comes with a request."""
    return bool(inputs.present(*_WEIGHTS, _FILES[1]))


def check_adapter_tensors(inputs: InputTensors) -> None:
    """Whether a request has an adapter in one form, which is complete, or none. Raises InvalidRequest."""
    _has_set(inputs)
    weights, files = inputs.present(*_WEIGHTS), inputs.present(*_FILES)
    if files and (tensors := inputs.present(*_WEIGHTS, "lora_config")):
        raise InvalidRequest(
            f"an adapter comes as tensors or as PEFT's files, not as both; the request has {tensors[0]} and {files[0]}"
        )
    if len(weights) > 1:
        raise InvalidRequest(f"an adapter has one dtype, the request has {' and '.join(weights)}")
    if bool(weights) != ("lora_config" in inputs):
        found = (weights or ["lora_config"])[0]
        raise InvalidRequest(
            f"Request for LoRA inference must have both lora_weights and lora_keys (lora_config); it has only {found}"
        )
    if len(files) == 1:
        raise InvalidRequest(f"PEFT's files are {' and '.join(_FILES)}; the request has only {files[0]}")
    if _USE in inputs and not (weights or files):
        raise InvalidRequest(f"{_USE} goes with an adapter's weights, and the request has none")
    if (weights or files) and not inputs.present("lora_task_id", "lora_name"):
        found = "lora_weights" if weights else _FILES[1]
        raise InvalidRequest(f"lora_task_id must be set for LoRA inference: the request has {found} and no id")


def read_expected_digest(inputs: InputTensors, row: int) -> str:
    """The digest that a row demands of its adapter; empty if the row demands none. Raises InvalidRequest."""
    if (digest := inputs.text("lora_expected_digest", row)) is None:
        return ""
    if not is_digest(digest):
        raise InvalidRequest(f"lora_expected_digest is {digest[:80]!r}, expected {DIGEST_FORM}")
    return digest


_SET = ("lora_set_task_ids", "lora_set_weights")


def read_set(inputs: InputTensors, row: int) -> tuple[SetMember, ...]:
    """The members of the set that a row asks for; none if it asks for no set. Raises InvalidRequest."""
    if not _has_set(inputs):
        return ()
    task_ids, weights = (inputs.vector(name, row) or [] for name in _SET)
    if len(task_ids) != len(weights):
        raise InvalidRequest(
            f"lora_set_task_ids has {len(task_ids)} values and lora_set_weights {len(weights)}; each member has both"
        )
    named = zip(task_ids, weights, strict=True)
    return checked_members(SetMember(lora_task_id, weight) for lora_task_id, weight in named)


def _has_set(inputs: InputTensors) -> bool:
    given = inputs.present(*_SET)
    if len(given) == 1:
        raise InvalidRequest(f"a set needs both {' and '.join(_SET)}; the request has only {given[0]}")
    if given and (others := inputs.present("lora_task_id", "lora_name", *_WEIGHTS, *_FILES)):
        raise InvalidRequest(f"the request has {' and '.join(_SET)}, and {others[0]}: it can have one adapter")
    return bool(given)


def read_task_id(inputs: InputTensors, row: int) -> int | None:
    """The adapter of a row, by its id, its name or both, or by its members; None is the base model."""
    if members := read_set(inputs, row):
        return set_task_id(members)
    task_id: int | None = inputs.scalar("lora_task_id", row)
    name = inputs.text("lora_name", row)
    if name is None:
        return task_id
    if task_id not in (None, task_id_of(name)):
        raise InvalidRequest(
            f"lora_name {name!r} is LoRA task {task_id_of(name)} and lora_task_id is {task_id}; send one of them"
        )
    return task_id_of(name)
