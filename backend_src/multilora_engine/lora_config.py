"""`LoRAConfig`: the parameters of adapters and of their cache, a part of `EngineConfig`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field

from multilora_wire.pieces import StoredDtype

ADAPTER_RANK_LIMIT = 256
"""Largest rank the kernels are written for."""


_SOURCES_EXAMPLE = '[{"source": "directory", "root": "/adapters"}]'


def _parse_sources(value: object) -> object:
    try:
        sources = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); write a list like {_SOURCES_EXAMPLE}") from None
    if not isinstance(sources, list):
        raise ValueError(f"not a list; write one like {_SOURCES_EXAMPLE}")
    for index, source in enumerate(sources):
        if not isinstance(source, dict | SourceSpec):
            raise ValueError(f"entry {index} is {source!r}; write an object as in {_SOURCES_EXAMPLE}")
        if isinstance(source, dict) and "source" not in source:
            raise ValueError(f'entry {index} has no member "source"; write an object as in {_SOURCES_EXAMPLE}')
    return sources


class SourceSpec(BaseModel):
    """An entry of `lora_sources`.

    source: `directory`, `huggingface`, `fsspec`, or `package.module:Class` for a plug-in. name: its name for
    operators and in errors, empty for the same. All other keys are `options`, the source's keyword arguments.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    source: str
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.source

    @property
    def options(self) -> dict[str, object]:
        return dict(self.model_extra or {})


class LoRAConfig(BaseModel):
    """The `lora_*` and `max_lora*` parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_loras: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description="Most adapters in one step (up to 4096); others wait. 0: max_num_seqs on a GPU, else 32.",
        ),
    ] = 0
    max_lora_rank: Annotated[
        int,
        Field(
            ge=1,
            le=ADAPTER_RANK_LIMIT,
            description=f"Largest rank accepted ({ADAPTER_RANK_LIMIT} at most). An adapter takes memory for "
            "its own rank only.",
        ),
    ] = 64
    lora_target_modules: Annotated[
        str,
        Field(description="Modules that adapters may change, like `attn_q,attn_v`. Empty: all that the model has."),
    ] = ""
    lora_max_adapter_bytes: Annotated[
        ByteSize,
        Field(ge=1, description="Largest `lora_weights` or `lora_peft_weights` accepted, in bytes or like `4GiB`."),
    ] = ByteSize(1 << 30)
    lora_dtype: Annotated[
        Literal["auto", StoredDtype],
        Field(
            description="Type of stored adapters. `auto`: the type of the model's arithmetic; `int8`, `fp8`, "
            "`int4`: codes."
        ),
    ] = "auto"
    lora_cache_host_memory_bytes: Annotated[
        ByteSize,
        Field(
            ge=0,
            description="Size of the host tier, like `4GiB`. 0: 1 GiB or an adapter of rank 16; for a GPU "
            "2 x max_loras of them.",
        ),
    ] = ByteSize(0)
    lora_cache_gpu_memory_fraction: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="Device tier: share of the memory after the weights. 0: max_loras of rank 16, from 0.05 "
            "to 0.5.",
        ),
    ] = 0.0
    lora_cache_dir: Annotated[
        Path | None,
        Field(description="Directory of the disk tier, for uploaded and evicted adapters. Empty: no disk tier."),
    ] = None
    lora_cache_disk_bytes: Annotated[
        ByteSize, Field(ge=1, description="Size of the disk tier, in bytes or like `4GiB`.")
    ] = ByteSize(16 << 30)
    lora_prefetch_dir: Annotated[
        Path | None,
        Field(
            description="Adapters to load at start: folders named by task id, with the two `.npy` files of upstream's "
            "converter."
        ),
    ] = None
    lora_sources: Annotated[
        list[SourceSpec],
        BeforeValidator(_parse_sources),
        Field(description="JSON list of sources to fetch adapters from when no tier has them. `[]`: none."),
    ] = []
    lora_on_conflict: Annotated[
        Literal["refuse", "replace"],
        Field(
            description="When a cached task id comes with other weights: `refuse` them, or `replace` for new requests."
        ),
    ] = "refuse"

    @property
    def target_modules(self) -> list[str]:
        """The names in `lora_target_modules`, between commas or spaces."""
        return self.lora_target_modules.replace(",", " ").split()
