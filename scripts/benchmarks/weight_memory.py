"""Measures by how much a process grows when it loads the default model, as floats and quantised.

A row for each kind of weights: the memory of linears and embeddings as the engine counts it, and the memory of a fresh
process's own, in no file, that is more after loading than before. Norms and rotary tables are in the growth only.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from checkpoints.prepare_default_model import ensure_default_checkpoint
from checkpoints.quantized_default_model import SchemeName, ensure_quantized_checkpoint
from marked_tables import write_table
from multilora_engine.engine.available_memory import give_back_freed_memory
from multilora_engine.models.loader import load_model
from multilora_engine.models.weights import Placement
from multilora_kernels import load_cpu_kernels
from plots import DOCS
from process_memory import anonymous_bytes
from sources import measured_source

PAGE = DOCS / "models.md"
TABLE = "weight memory"
MAX_GROWTH = 1.05
"""The goal: the most that a process grows, as a multiple of its quantised weights."""


@dataclass(frozen=True)
class Loaded:
    """Bytes of a model's weights, and of the growth of the process that loaded it."""

    weights: int
    growth: int


def checkpoints() -> dict[str, tuple[Path, torch.dtype]]:
    """By kind of weights the checkpoint, and the type that its floats are stored in."""
    default = ensure_default_checkpoint()
    floats = {"float32": (default, torch.float32), "bfloat16": (default, torch.bfloat16)}
    schemes: tuple[SchemeName, ...] = ("w8a16", "w4a16")
    return floats | {scheme: (ensure_quantized_checkpoint(scheme), torch.float32) for scheme in schemes}


def load_in_a_fresh_process(checkpoint: Path, weight_dtype: torch.dtype) -> Loaded:
    """Load a model once, as the engine does."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(_load, checkpoint, weight_dtype).result()


def _load(checkpoint: Path, weight_dtype: torch.dtype) -> Loaded:
    load_cpu_kernels()
    process = psutil.Process()
    before = anonymous_bytes(process)
    model = load_model(checkpoint, Placement(torch.float32, weight_dtype, torch.device("cpu")))
    give_back_freed_memory()
    return Loaded(sum(model.weight_bytes.values()), anonymous_bytes(process) - before)


def memory_table(models: Mapping[str, Loaded]) -> str:
    """A row for each kind of weights."""
    lines = ["| weights | bytes of weights | the process grows by | of the weights |", "| --- | ---: | ---: | ---: |"]
    for name, loaded in models.items():
        share = loaded.growth / loaded.weights
        lines.append(f"| {name} | {_mebibytes(loaded.weights)} | {_mebibytes(loaded.growth)} | {share:.3f} x |")
    return "\n".join(lines) + "\n"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def main(
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/models.md.")] = False,
) -> None:
    """Measure the memory that loading the default model takes, print a table, and fail where the goal is missed."""
    source = measured_source() if update_docs else ""
    models = {name: load_in_a_fresh_process(*arguments) for name, arguments in checkpoints().items()}
    table = memory_table(models)
    print(table, end="")
    if update_docs:
        write_table(PAGE, TABLE, table, source)
    if any(loaded.growth > MAX_GROWTH * loaded.weights for loaded in models.values()):
        raise typer.Exit(1)
