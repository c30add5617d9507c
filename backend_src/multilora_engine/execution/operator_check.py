"""The self-test of the GPU operators in a model's own shapes, once at start.

A device that computes otherwise than the tested ones is refused, and gives no client wrong tokens.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multilora_engine.config import EngineConfig
from multilora_engine.execution.start_progress import StartProgress
from multilora_engine.models.model import Model
from multilora_kernels import LoRATables
from multilora_kernels.self_test import OperatorFault, OperatorShapes, device_name, self_test

_logger = logging.getLogger(__name__)


def check_operators(model: Model, tables: LoRATables, kv_dtype: torch.dtype, config: EngineConfig) -> None:
    """Compare the operators with the reference on the tables' device. Raises OperatorFault for one that is wrong."""
    device, started = tables.arena.device, time.monotonic()
    shapes = operator_shapes(model, tables, config.block_size, kv_dtype)
    with StartProgress("self-test") as progress:
        num_comparisons = self_test(shapes, device, progress.note)
    seconds = time.monotonic() - started
    _logger.info("self-test on %s: %d comparisons passed in %.1f s", device_name(device), num_comparisons, seconds)


@contextmanager
def faults_named(step: str, device: torch.device) -> Iterator[None]:
    """Raise OperatorFault, which names the operator, for whatever fails in a first step. step: in words.

    Kernels of some numbers of rows are in no comparison. A device may tell of a fault later than where it came to be.
    Memory that does not suffice is no fault.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, the launch or the device, which have no class in common
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
    widths = {(site.in_size, (site.out_size,)) for site in model.adapter_sites.sites}
    coded = [switch.codes for switch in model.weight_switches]
    fused = (config.hidden_size, (config.q_size, config.kv_size, config.kv_size))
    ropes = [config.ropes[name] if name else None for name in dict.fromkeys(config.layer_ropes)]
    rotations = dict.fromkeys((rope.rotary_dim, rope.is_interleaved) if rope else (0, False) for rope in ropes)
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
    )
