"""The self-test of a GPU, once at start: the operators in a model's own shapes, then the captured steps.

A device that computes otherwise than the tested ones is refused, and gives no client wrong tokens. A graph that reads
other memory than it should, or work that was not captured, would give wrong tokens and no error: captured steps are
compared with the same steps launched kernel by kernel.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from types import TracebackType
from typing import Self

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.config import EngineConfig
from multilora_engine.execution.cuda_graphs import DecodeGraphs
from multilora_engine.execution.device_probe import is_out_of_memory
from multilora_engine.execution.piecewise_graphs import PiecewiseGraphs
from multilora_engine.models.model import Model
from multilora_kernels import LoRATables
from multilora_kernels.self_test import (
    TOLERANCES,
    ExpertShapes,
    OperatorFault,
    OperatorShapes,
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


_PRIME = 7919
"""Spreads tokens over the vocabulary."""


class GraphFault(Exception):
    """A captured step gives other logits than its kernels one by one."""


@torch.inference_mode()
def check_graphs(
    graphs: DecodeGraphs,
    forward: Callable[[ForwardBatch], torch.Tensor],
    tables: LoRATables,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> None:
    """Every graph, full and with a row of padding, with two sets of tokens. Raises GraphFault.

    forward: computes a step at once. num_blocks: of a cache that holds nothing yet. dtype: of the model.
    """
    for size, tokens_of, has_adapters in product(graphs.sizes, (1, 2), (True, False)):
        num_rows = size if tokens_of == 1 else max(1, size - 1)
        batch = _first_step(num_rows, tokens_of, tables, num_blocks, block_size, vocab_size, has_adapters)
        _compare(graphs.run(batch), forward(batch), dtype, f"{size} sequences", has_adapters)


@torch.inference_mode()
def check_pieces(graphs: PiecewiseGraphs, model: Model, kv_cache: KVCache, tables: LoRATables, block_size: int) -> None:
    """Every size of steps with prompts, full and with padding, with two sets of tokens. Raises GraphFault."""
    for size, tokens_of, has_adapters in product(graphs.sizes, (1, 2), (True, False)):
        num_tokens = size if tokens_of == 1 else max(1, size - 1)
        batch = _prompts(num_tokens, tokens_of, tables, block_size, model.config.vocab_size, has_adapters)
        expected = model.forward(batch, kv_cache)
        actual = model.logits(graphs.run(batch), batch.logits_indices, batch.lora)
        _compare(actual, expected, model.dtype, f"{size} tokens", has_adapters)


def _compare(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: str, has_adapters: bool) -> None:
    error = ((actual - expected).abs().max() / (TOLERANCES[dtype] * expected.abs().max())).item()
    # So that a NaN is an error, too.
    if not error <= 1:
        raise GraphFault(
            f"the CUDA graph of {size} {'with' if has_adapters else 'without'} adapters gives other logits than its "
            f"kernels one by one: the largest difference is {error:.3g} times the allowed one"
        )


def _prompts(
    num_tokens: int, tokens_of: int, tables: LoRATables, block_size: int, vocab_size: int, has_adapters: bool
) -> ForwardBatch:
    """First tokens of sequences of a block each, all in block 0: tokens of one position are equal, and so write equal
    keys and values.
    """
    tokens = torch.arange(num_tokens, device=tables.rank.device)
    positions = tokens % block_size
    lens = [min(block_size, num_tokens - start) for start in range(0, num_tokens, block_size)]
    ends = torch.tensor([0, *accumulate(lens)], device=tokens.device)
    return ForwardBatch(
        input_ids=(positions + tokens_of) * _PRIME % vocab_size,
        positions=positions,
        slot_mapping=positions,
        query_lens=lens,
        context_lens=lens,
        num_keys=ends.diff(),
        query_starts=ends,
        block_tables=ends.new_zeros(len(lens), 1),
        num_decodes=0,
        logits_indices=ends[1:] - 1,
        block_size=block_size,
        lora=TokenLoRAs(tables, torch.zeros_like(tokens)) if has_adapters else None,
    )


def _first_step(
    num_rows: int,
    tokens_of: int,
    tables: LoRATables,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    has_adapters: bool,
) -> ForwardBatch:
    """A first token of each row's sequence. Rows that share a block have one token and adapter, and write the same."""
    rows = torch.arange(num_rows, device=tables.rank.device)
    blocks = rows % num_blocks
    return ForwardBatch(
        input_ids=(blocks + tokens_of) * _PRIME % vocab_size,
        positions=torch.zeros_like(rows),
        slot_mapping=blocks * block_size,
        query_lens=[1] * num_rows,
        context_lens=[1] * num_rows,
        num_keys=torch.ones_like(rows),
        query_starts=torch.arange(num_rows + 1, device=rows.device),
        block_tables=blocks[:, None],
        num_decodes=num_rows,
        logits_indices=rows,
        block_size=block_size,
        lora=TokenLoRAs(tables, blocks % len(tables.rank)) if has_adapters else None,
    )
