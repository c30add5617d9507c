"""The self-test of a GPU, once at start: the operators in a model's own shapes.

A device that computes otherwise than the tested ones is refused, and gives no client wrong tokens.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from multilora_engine.config import EngineConfig
from multilora_engine.models.model import Model
from multilora_engine.out_of_memory import is_out_of_memory
from multilora_kernels import LoRATables
from multilora_kernels.self_test import (
    ExpertShapes,
    OperatorFault,
    OperatorShapes,
    checked_operators,
    device_name,
    self_test,
)


class StartProgress:
    """Writes a line every few seconds, also while one item takes long: a load that compiles does not look hung.

        with StartProgress("self-test") as progress:
            progress.note(3, 40, "lora_apply")

    It has a thread of its own, since compilers keep the engine's for as long as a kernel takes.
    """

    def __init__(self, part: str, interval_s: float = 5.0) -> None:
        self._part, self._interval_s = part, interval_s
        self._item: tuple[int, int, str, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="start-progress", daemon=True)

    def note(self, done: int, total: int, item: str) -> None:
        """So many of all items are done, and this one begins."""
        self._item = (done, total, item, time.monotonic())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._item is not None:
                done, total, item, began_s = self._item
                seconds = time.monotonic() - began_s
                _logger.info("%s: %d of %d are done; now %s, for %.0f s", self._part, done, total, item, seconds)


_logger = logging.getLogger(__name__)


def check_operators(model: Model, tables: LoRATables, kv_dtype: torch.dtype, config: EngineConfig) -> None:
    """Compare the operators with the reference on the tables' device. Raises OperatorFault for one that is wrong."""
    device, started = tables.arena.device, time.monotonic()
    shapes = operator_shapes(model, tables, config.block_size, kv_dtype)
    with StartProgress("self-test") as progress:
        num_comparisons = self_test(shapes, device, progress.note)
    seconds = time.monotonic() - started
    _logger.info("self-test on %s: %d comparisons passed in %.1f s", device_name(device), num_comparisons, seconds)


def launch_operators(model: Model, tables: LoRATables, kv_dtype: torch.dtype, config: EngineConfig) -> None:
    """The comparisons of `check_operators`, right or wrong: to note their kernels."""
    for _ in checked_operators(operator_shapes(model, tables, config.block_size, kv_dtype), tables.arena.device):
        pass


@contextmanager
def faults_named(step: str, device: torch.device) -> Iterator[None]:
    """Raise OperatorFault, which names the operator, for whatever fails in a first step. step: in words.

    Kernels of some numbers of rows are in no comparison. A device may tell of a fault later than where it came to be.
    Memory that does not suffice is no fault.
    """
    try:
        yield
    except Exception as error:  # of the compiler, the launch or the device, which have no class in common
        if is_out_of_memory(error):
            raise
        # Imported here: Triton comes with the CUDA builds of torch only.
        from multilora_kernels import cuda

        frames = traceback.extract_tb(error.__traceback__)
        operator = next((frame.name for frame in reversed(frames) if frame.name in cuda.__all__), "no operator of ours")
        raise OperatorFault(
            f"{step} failed on {device_name(device)}, in {operator}: {type(error).__name__}: {error}"
        ) from error


def operator_shapes(model: Model, tables: LoRATables, block_size: int, kv_dtype: torch.dtype) -> OperatorShapes:
    """The shapes of a model's operators: each width of a linear once, and queries, keys and values as one."""
    # Imported here: Triton comes with the CUDA builds of torch only.
    from multilora_kernels.cuda.block_sizes import capability, row_bounds

    config = model.config
    bounds = row_bounds(capability(tables.arena.device))
    widths = {(site.in_size, (site.out_size,)) for site in model.adapter_sites.sites if site.experts == 1}
    coded = [switch.codes for switch in model.weight_switches]
    fused = (config.hidden_size, (config.q_size, config.kv_size, config.kv_size))
    ropes = [config.ropes[name] if name else None for name in dict.fromkeys(config.layer_ropes)]
    rotations = dict.fromkeys((rope.rotary_dim, rope.is_interleaved) if rope else (0, False) for rope in ropes)
    # Of a mixture the gates of the experts come first.
    gates = next((site for site in model.adapter_sites.sites if site.experts > 1), None)
    experts = None
    if config.routing is not None and gates is not None:
        choice = (gates.experts, config.routing.top_k, gates.out_size)
        experts = ExpertShapes(*choice, config.clamp_limit, config.mlp_bias)
    return OperatorShapes(
        hidden_size=config.hidden_size,
        mlp_size=config.intermediate_size,
        linears=(fused, *sorted(widths)),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        max_rank=tables.max_rank,
        dtype=model.dtype,
        lora_dtype=tables.arena.dtype,
        more_rows=(*bounds, bounds[-1] + 1) if bounds else (),
        vocab_size=config.vocab_size,
        kv_dtype=kv_dtype,
        rotations=tuple(rotations),
        code_types=tuple({(codes.code_type, codes.group_size): None for codes in coded}),
        experts=experts,
    )
