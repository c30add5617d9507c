"""How fast whole steps of a model are, beside what memory and arithmetic allow: no scheduler, no sampling, no server.

The model has the shape of Llama-3.1-8B and random weights, so nothing is downloaded. Decode steps have 1, 32 and 128
sequences, each with the same context, and no adapters, one, or as many distinct ones as sequences; on a GPU they are
replayed as CUDA graphs, as the engine does. Prefill is one prompt of 2048 tokens.

limit   the larger of: bytes that must move over measured bandwidth, flops over measured peak of a matrix product. Bytes
        are weights, keys and values, and the step's adapters, each once; flops are those of the base model's linears.

The steps and the limits of one batch size run in turn, round after round, and medians are reported. Takes a few minutes
on a GPU with 48 GB; on a CPU it wants a smaller model (--tiny). Nothing of it has been measured on a GPU yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.bench_rows import Row, render, threads_title, write_results
from benchmarks.lora_workloads import Step
from benchmarks.machine_limits import Clock, Yardsticks, measure
from multilora_engine.execution.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.registry import build_model
from multilora_engine.models.rope_config import Rope
from multilora_engine.models.weights import FloatFormat, Placement
from multilora_kernels import LoRATables

RANK = 16
BLOCK_SIZE = 16
GOAL_OF_LIMIT = 0.8
"""The goal for a decode step of one sequence without adapters: the share of its limit."""

GOAL_OF_BASE = 0.85
"""The goal: the share of the base model's speed, with as many distinct adapters as the largest batch has sequences."""


def llama_config(
    num_layers: int, hidden: int, num_heads: int, num_kv_heads: int, ffn: int, vocab_size: int
) -> ModelConfig:
    """A Llama by its sizes."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden // num_heads,
        intermediate_size=ffn,
        vocab_size=vocab_size,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        ropes={"all": Rope(500000.0, hidden // num_heads, 131072)},
        layer_ropes=("all",) * num_layers,
        sliding_window=(None,) * num_layers,
        tie_word_embeddings=False,
        dtype="bfloat16",
        end_token_ids=(),
    )


EIGHT_BILLION = llama_config(32, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab_size=128256)
TINY = llama_config(2, hidden=64, num_heads=4, num_kv_heads=2, ffn=96, vocab_size=300)


class EagerClock(Clock):
    """Times a step as it is: prompts are never captured."""

    def prepare(self, step: Step) -> Step:
        """Run a step once ahead, which compiles the kernels that are not compiled yet."""
        step()
        return step


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement. batches: sequences of a decode step; each with a context of `context` tokens."""

    batches: Sequence[int]
    context: int
    prompt: int

    def adapters(self, batch: int) -> list[int]:
        """How many distinct adapters a batch is measured with."""
        return [n for n in sorted({0, 1, *self.batches}) if n <= batch]


class Workbench:
    """A model with random weights, a KV cache that is full of contexts, and adapters on all linears."""

    def __init__(self, config: ModelConfig, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.sizes, self.device = config, sizes, device
        self.model = build_model(config, FloatFormat(Placement(dtype, dtype, device)))
        for place in self.model.checkpoint_tensors().values():
            place.copy_(torch.randn(tuple(place.shape), dtype=dtype, device=device) * 0.02)
        self._max_blocks = -(-max(sizes.context, sizes.prompt) // BLOCK_SIZE)
        num_slots = max(sizes.batches) * self._max_blocks * BLOCK_SIZE
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self._cache = KVCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
        self.tables = random_tables(config, max(sizes.batches), dtype, device)

    def decode(self, batch: int, num_adapters: int) -> Step:
        """A step of `batch` sequences; sequence s has adapter s % num_adapters, or none for 0."""
        mapping = torch.arange(batch, device=self.device) % max(num_adapters, 1)
        lora = TokenLoRAs(self.tables, mapping) if num_adapters else None
        return self._step(torch.full((batch, 1), self.sizes.context - 1), lora)

    def prefill(self) -> Step:
        """A step of one prompt without an adapter."""
        return self._step(torch.arange(self.sizes.prompt)[None], None)

    def _step(self, positions: torch.Tensor, lora: TokenLoRAs | None) -> Step:
        """positions: [sequences, tokens], of the tokens that are computed."""
        num_seqs, num_tokens = positions.shape
        positions = positions.to(self.device)
        block_tables = torch.arange(num_seqs * self._max_blocks, device=self.device).view(num_seqs, -1)
        slots = block_tables.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = ForwardBatch(
            input_ids=torch.arange(positions.numel(), device=self.device) % self.config.vocab_size,
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            query_lens=[num_tokens] * num_seqs,
            context_lens=(positions[:, -1] + 1).tolist(),
            num_keys=positions[:, -1] + 1,
            block_tables=block_tables,
            num_decodes=num_seqs if num_tokens == 1 else 0,
            logits_indices=torch.arange(num_tokens - 1, positions.numel(), num_tokens, device=self.device),
            block_size=BLOCK_SIZE,
            lora=lora,
        )

        @torch.inference_mode()
        def step() -> None:
            self.model.forward(batch, self._cache)

        return step

    def decode_work(self, batch: int, num_adapters: int) -> tuple[float, float]:
        """Bytes and flops of a decode step."""
        weights = self.num_layer_weights + self._num_head_weights
        keys_and_values = 2 * batch * self.sizes.context * self.config.num_layers * self.config.kv_size
        adapters = num_adapters * self.tables.arena.numel() / len(self.tables.rank)
        return (weights + keys_and_values + adapters) * self.tables.arena.itemsize, 2.0 * weights * batch

    @property
    def num_layer_weights(self) -> int:
        """Elements of the linears of all layers."""
        return sum(outputs * inputs for inputs, outputs in linears(self.config)) * self.config.num_layers

    @property
    def _num_head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size


def linears(config: ModelConfig) -> list[tuple[int, int]]:
    """in_features, out_features of a layer's seven linears, in the order of the adapters' slices."""
    hidden, q, kv, ffn = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    return [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden)]


def random_tables(config: ModelConfig, num_adapters: int, dtype: torch.dtype, device: torch.device) -> LoRATables:
    """Adapters of rank `RANK` on all linears of all layers, one after another."""
    shapes = linears(config) * config.num_layers
    sizes = [RANK * size for shape in shapes for size in shape]
    starts = torch.tensor([0, *itertools.accumulate(sizes)], device=device)
    first = torch.arange(num_adapters, device=device)[:, None] * starts[-1]
    offsets = first + starts[:-1]
    rank = torch.full((num_adapters, len(shapes)), RANK, dtype=torch.int32, device=device)
    arena = torch.empty(num_adapters * sum(sizes), dtype=dtype, device=device).normal_(std=0.01)
    a_offset, b_offset = offsets[:, ::2].contiguous(), offsets[:, 1::2].contiguous()
    return LoRATables(arena, rank, a_offset, b_offset, torch.full_like(a_offset, -1), RANK)


def bench_decode(bench: Workbench, batch: int, clock: Clock, rounds: int) -> list[Row]:
    """Measure a batch size with every number of adapters."""
    counts = bench.sizes.adapters(batch)
    yardsticks = Yardsticks(clock.device, bench.model.dtype)
    steps = {f"{n}": bench.decode(batch, n) for n in counts}
    seconds = measure(steps | yardsticks.steps, clock, rounds)
    limits = yardsticks.limits(seconds)
    rows = []
    for n in counts:
        num_bytes, num_flops = bench.decode_work(batch, n)
        of_limit = limits.seconds(num_bytes, num_flops) / seconds[f"{n}"]
        of_base = seconds["0"] / seconds[f"{n}"]
        name = f"decode {batch} sequences, {n} adapters"
        rows += [
            Row(name, 1e3 * seconds[f"{n}"], "ms"),
            Row(name, batch / seconds[f"{n}"], "tokens/s"),
            _share(name, of_limit, "% of limit", GOAL_OF_LIMIT if (batch, n) == (1, 0) else None),
            _share(name, of_base, "% of base", GOAL_OF_BASE if n == max(bench.sizes.batches) else None),
        ]
    return rows


def bench_prefill(bench: Workbench, clock: Clock, rounds: int) -> list[Row]:
    """Measure one prompt."""
    yardsticks = Yardsticks(clock.device, bench.model.dtype)
    seconds = measure({"prefill": bench.prefill()} | yardsticks.steps, EagerClock(clock.device), rounds)
    num_tokens = bench.sizes.prompt
    flops = 2.0 * bench.num_layer_weights * num_tokens
    name = f"prefill {num_tokens} tokens"
    return [
        Row(name, num_tokens / seconds["prefill"], "tokens/s"),
        _share(name, flops / yardsticks.limits(seconds).peak / seconds["prefill"], "% of peak", None),
    ]


def _share(what: str, share: float, unit: str, goal: float | None) -> Row:
    if goal is None:
        return Row(what, 100 * share, unit)
    return Row(what, 100 * share, unit, f">= {goal:.0%}", share >= goal)


def bench_all(bench: Workbench, rounds: int, console: Console) -> list[Row]:
    """Measure all batch sizes, then the prompt."""
    clock, rows = Clock(bench.device.type), []
    with Progress(console=console) as progress:
        for batch in progress.track(bench.sizes.batches, description="decode"):
            rows += bench_decode(bench, batch, clock, rounds)
    return rows + bench_prefill(bench, clock, rounds)


def main(
    output: Annotated[Path, typer.Option(help="Folder for steps.csv and steps.png.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Times each step runs.")] = 21,
    context: Annotated[int, typer.Option(help="Tokens that each decoding sequence attends to.")] = 512,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of thousands of weights, to try the script.")] = False,
) -> None:
    """Measure whole steps of a model with random weights."""
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    title = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {threads_title()}"
    bench = Workbench(TINY if tiny else EIGHT_BILLION, Sizes((1, 32, 128), context, prompt), dtype, device)
    rows = bench_all(bench, rounds, console)
    console.print(render(rows, title))
    write_results(rows, output, "steps")
    console.print(f"Wrote {output}/steps.csv and {output}/steps.png")
