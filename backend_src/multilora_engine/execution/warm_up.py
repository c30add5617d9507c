"""The kernels of every step that may come, compiled at start: no request waits for a compiler, and no watchdog kills an
engine that compiles.

The compiler keeps them (TRITON_CACHE_DIR), so that only the first start on a machine takes long. There processes beside
each other compile them (`compile_kernels`), before anything launches them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from multilora_engine.batch.forward_batch import KVCache
from multilora_engine.execution.self_test import StartProgress, faults_named
from multilora_engine.execution.step_memory import source_lens, step_lens, trial_batch
from multilora_engine.models.model import Model
from multilora_kernels import (
    LoRATables,
    SamplingRule,
    forbid_tokens,
    has_own_order,
    order_codes,
    penalise_tokens,
    sample_tokens,
)

_logger = logging.getLogger(__name__)

_FEWEST_TOKENS = 128
_DRAWN = SamplingRule(temperature=1.0, top_k=2, top_p=0.9, min_p=0.0, uniform=0.5)


@torch.inference_mode()
def compute_steps(
    model: Model,
    kv_cache: KVCache,
    tables: LoRATables,
    max_num_tokens: int,
    max_num_seqs: int,
    max_len: int,
    block_size: int,
    max_num_encoder_tokens: int = 0,
) -> int:
    """Compute one step of each kind, with an adapter and without. Returns the number of kinds.

    They lie in the first block of a cache that holds nothing yet.

    max_num_tokens, max_num_seqs, max_num_encoder_tokens: of a step. max_len: of a sequence. Raises OperatorFault for a
    step that fails.
    """
    # Imported here: Triton comes with the CUDA builds of torch only.
    from multilora_kernels.cuda.block_sizes import capability, row_bounds
    from multilora_kernels.cuda.quantized import ROW_BOUNDS

    bounds = [*row_bounds(capability(kv_cache.keys.device)), *(ROW_BOUNDS if model.weight_switches else ())]
    steps = warm_up_steps(max_num_tokens, max_num_seqs, max_len, bounds)
    if has_own_order(tables.arena):
        _order_nothing(tables)
    with StartProgress("kernels of steps") as progress:
        for number, query_lens in enumerate(steps):
            step = f"a step of {sum(query_lens)} tokens in {len(query_lens)} sequences"
            progress.note(number, len(steps), step)
            is_last = number == len(steps) - 1
            num_source_tokens = max_num_encoder_tokens if is_last else min(max_num_encoder_tokens, sum(query_lens))
            sources = source_lens(model.config.source, num_source_tokens)
            batch = trial_batch(query_lens, block_size, tables, sources)
            with faults_named(step, kv_cache.keys.device):
                logits = model.forward(batch, kv_cache)
                _adjust(logits)
                sample_tokens(logits, [_DRAWN] * len(logits)).tolist()
                # Kernels of their own compute what adapters' updates compute, too, such as activations.
                model.forward(replace(batch, lora=None), kv_cache)
    return len(steps)


def compile_kernels(launch: Callable[[], object], device: torch.device, memory: int) -> None:
    """Have the kernels that a function launches compiled in processes beside each other: some sixty of them, one after
    the other, take a minute or two. The function's launches compute nothing.

    memory: bytes of the machine's memory that the processes may take.
    """
    # Imported here: Triton comes with the CUDA builds of torch only.
    import triton

    from multilora_kernels.cuda.ahead import compile_ahead, noted_kernels
    from multilora_kernels.cuda.dependent_launch import launches_dependently

    started = time.monotonic()
    # Its trial computes, and decides on kernels.
    launches_dependently(device)
    with StartProgress("kernels") as progress:
        with noted_kernels() as kernels:
            launch()
        ahead = compile_ahead(kernels, triton.runtime.driver.active.get_current_target(), memory, progress.note)
    _logger.info(
        "%d kernels: %d compiled in %d processes, %d found in %s, %d left to their first launch; %.1f s",
        *(len(kernels), ahead.num_compiled, ahead.num_processes, ahead.num_found, triton.knobs.cache.dir),
        *(ahead.num_failed, time.monotonic() - started),
    )


def _order_nothing(tables: LoRATables) -> None:
    """What brings an adapter's codes to the order of the device, for one matrix without ranks or outputs."""
    nothing = torch.zeros(1, dtype=torch.int64, device=tables.arena.device)
    order_codes(tables.arena, nothing, nothing, nothing, tables.max_rank)


def _adjust(logits: torch.Tensor) -> None:
    """A penalty and a ban in the first row."""
    counts = torch.zeros(1, logits.shape[1], dtype=torch.int32, device=logits.device)
    places = torch.zeros(3, 1, dtype=torch.int64, device=logits.device)
    last_token_ids = places.new_zeros(len(logits))
    penalise_tokens(logits, counts, places, last_token_ids, counts.new_ones(1, 3, dtype=torch.float64))
    forbid_tokens(logits, places, last_token_ids)


def warm_up_steps(max_num_tokens: int, max_num_seqs: int, max_len: int, bounds: Sequence[int] = ()) -> list[list[int]]:
    """Tokens of each sequence of some steps, in which every kernel of any step is.

    The number of tokens counts by powers of two, and by `bounds`, up to which there are plans. Steps without a prompt
    and steps with one have kernels of their own: where a size has room for both, there are both.
    """
    sizes = [1]
    while sizes[-1] < max_num_tokens:
        sizes.append(min(max(_FEWEST_TOKENS, 2 * sizes[-1]), max_num_tokens))
    sizes = sorted({*sizes, *(size for bound in bounds for size in (bound, bound + 1) if size <= max_num_tokens)})
    steps = []
    for size in sizes:
        if size <= max_num_seqs:
            steps.append([1] * size)
        if size > 1 and max_len > 1:
            num_seqs = max_num_seqs if size > max_num_seqs else size // 2
            steps.append(step_lens(size, num_seqs, max_len))
    return steps
