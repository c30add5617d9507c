"""How fast the engine's steps are, in this process, beside the limits of the machine's memory and arithmetic.

decode     one step of 1, 8, 16 and 32 sequences, with weights stored as float32 and as bfloat16, and as the default
           model's in w8a16 and w4a16, against its limit: the larger of weights and KV cache over the measured read
           bandwidth, and flops over the measured rate of products (machine_limits.py)
bfloat16   the same steps in `dtype=bfloat16`, with weights in bfloat16, w8a16 and w4a16, against the rate of bfloat16
           products where the processor has them
prefill    of one long prompt, in the chunks the engine is configured for, with the same weights, against the rate of
           float32 matrix products that are measured before and after each chunk: a share for each round, their median
           and their extremes
prefix     time to the first token of a prompt, when the cache has most of it from another one and when it has not
adapters   decoding 16 sequences with one adapter or 16 different ones on all linear layers, and with adapters that are
           loaded but not used, against the engine without any
general    the default model by transformers' modules: a step beside one of the engine's own layers, and with 16
           different adapters beside transformers with PEFT
experts    decoding 16 sequences of a mixture of OLMoE-1B-7B's shape with two layers of random weights in bfloat16, with
           16 different adapters on attention, and on all linears and experts, against the base, and beside
           transformers with PEFT, which takes adapters of experts one after another
encoder-decoder
           16 answers at once of models with random weights, of T5-small's and BART-base's shape, with 16 different
           adapters and with none, beside transformers with PEFT; and a step of 16 sequences against its limit
overhead   what a step of 64 sequences costs beside the model, on one core: scheduling, batch, sampling, text, emission.
           The model is a tiny one, so that nothing else happens

Everything that is compared runs in turn, round after round, so that other load on the machine meets all contestants;
medians are reported.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.adapter_bench import random_wire
from benchmarks.encoder_decoder_bench import encoder_decoder_rows
from benchmarks.engine_bench import CHUNK, GREEDY, NUM_ADAPTERS, RANK, WARM_UP_STEPS, Bench, RepeatedLimits, Work
from benchmarks.machine_limits import matrix_rate, seconds_of
from benchmarks.results import Row, at_least, at_most, report, threads_title
from checkpoints.telling_adapters import save_plain_tokenizer
from checkpoints.tiny_llama import save_tiny_llama
from marked_tables import figure, markdown_table, write_table
from multilora_engine.lora.format import TORCH_DTYPES, pack_adapter
from multilora_engine.models.decoder import Decoder
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.quickstart.quantized_default_model import SchemeName, ensure_quantized_checkpoint
from multilora_engine.request import SamplingParams
from multilora_wire.module_names import ATTN_DENSE, ATTN_K, ATTN_Q, ATTN_V
from plots import PERFORMANCE, write_plots
from sources import measured_source

BATCHES = (32, 16, 8, 1)
"""Sequences that decode together."""

QUANTIZED: tuple[SchemeName, ...] = ("w8a16", "w4a16")
"""Schemes of the quantised default model that are measured beside the float one."""

MAX_LIMITS, MAX_QUANTIZED_LIMITS = {1: 1.25, 16: 1.5}, {1: 1.3, 16: 1.6}
"""The goal: a decode step of so many sequences takes at most so many times its limit."""

LEAST_SPEEDUPS = {("w4a16", 1): 3.0}
"""The goal: how many times as fast as with float32 weights a step of so many sequences is; for all others 1."""

IN_BFLOAT16 = " in bfloat16"
"""After the names of weights whose engines compute in bfloat16."""

LEAST_GENERAL_SHARES, LEAST_TIMES_PEFT = {1: 0.5, 16: 0.8}, 2.0
"""The goals of transformers' modules: of the tokens a second of the engine's own layers by sequences, and of PEFT's."""

LEAST_SHARES_OF_A_MIXTURE = {"adapters on attention": 0.95, "adapters on all": 0.85}
LEAST_TIMES_PEFT_OF_A_MIXTURE = 5.0
"""The goals of a mixture: the shares of the base's tokens that adapters leave, and times of PEFT's tokens."""

_ATTENTION = frozenset({ATTN_Q, ATTN_K, ATTN_V, ATTN_DENSE})

MAX_OVERHEAD_MS = 2
"""The goal: the most time that a step takes beside the model."""

MIXED = (
    SamplingParams(1),
    SamplingParams(1, temperature=0.8, top_k=50),
    SamplingParams(1, temperature=0.7, top_k=0, top_p=0.9),
    SamplingParams(1, temperature=1.2, top_k=0, min_p=0.05),
    SamplingParams(1, temperature=1.0, top_k=0),
)
"""The sampling that the requests of a batch ask for, in turn."""

_TINY_VOCABULARY = 4096
_OF_THE_LIMIT = ": of the limit"
_MACHINE = "machine: "


def decode_rows(
    benches: Mapping[str, Bench], dtype: torch.dtype, rounds: int, context: int, num_steps: int
) -> list[Row]:
    """Step times and their multiples of the limits, by the type that an engine stores its weights in."""
    repeated = RepeatedLimits(dtype)
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _, (weights, bench), n in itertools.product(range(rounds), benches.items(), BATCHES):
        repeated.measure()
        with bench.batch(n, context):
            bench.step_seconds(WARM_UP_STEPS)
            seconds[weights, n] += bench.step_seconds(num_steps)
    limits = repeated.limits
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    rows = [
        Row(f"{_MACHINE}read bandwidth", limits.bandwidth / 1e9, "GB/s"),
        Row(f"{_MACHINE}{str(repeated.dtype).removeprefix('torch.')} products", limits.peak / 1e9, "GFLOP/s"),
    ]
    for weights, bench in benches.items():
        stored = weights.removesuffix(IN_BFLOAT16)
        work, goals = work_of(bench, stored, dtype), MAX_QUANTIZED_LIMITS if stored in QUANTIZED else MAX_LIMITS
        for n in reversed(BATCHES):
            limit = work.decode_seconds([context + WARM_UP_STEPS + num_steps // 2] * n, limits)
            name = f"decode {n}, {weights}"
            rows.append(Row(name, medians[weights, n] * 1e3, "ms"))
            rows.append(at_most(f"{name}{_OF_THE_LIMIT}", medians[weights, n] / limit, "x", goals.get(n)))
    return rows + [
        at_least(
            f"decode {n}, {weights} against float32",
            medians["float32", n] / medians[weights, n],
            "x",
            LEAST_SPEEDUPS.get((weights, n), 1.0),
        )
        for weights, n in sorted(medians)
        if weights in QUANTIZED
    ]


def bfloat16_rows(
    checkpoints: Mapping[str, Path], rounds: int, context: int, num_steps: int, **options: Any
) -> list[Row]:
    """`decode_rows` of engines that compute in bfloat16. checkpoints: by the type or scheme of their weights."""
    options |= {"dtype": "bfloat16"}
    benches = {f"{weights}{IN_BFLOAT16}": Bench(path, **options) for weights, path in checkpoints.items()}
    rows = decode_rows(benches, torch.bfloat16, rounds, context, num_steps)
    for bench in benches.values():
        bench.close()
    return rows


def work_of(bench: Bench, weights: str, dtype: torch.dtype) -> Work:
    """The work of an engine that stores its weights as a type of floats, or in a scheme of QUANTIZED."""
    if weights in QUANTIZED:
        return Work.of_codes(bench.model, dtype, Path(bench.engine.info.model_path))
    return Work(bench.model, dtype, TORCH_DTYPES[weights])


def prefill_rows(benches: Mapping[str, Bench], rounds: int, num_tokens: int) -> list[Row]:
    """A prompt in each engine in turn, by the type that it stores its weights in."""
    runs = {weights: PrefillRuns(bench, num_tokens) for weights, bench in benches.items()}
    for _, run in itertools.product(range(rounds), runs.values()):
        run.measure()
    rows = [row for weights, run in runs.items() for row in run.rows(f"prefill {num_tokens}, {weights}")]
    return rows + [
        at_least(f"prefill {num_tokens}, {name} against float32", runs["float32"].median / runs[name].median, "x", 1.0)
        for name in runs
        if name in QUANTIZED
    ]


class PrefillRuns:
    """A prompt from its first to its last chunk, each time beside the matrix products that were measured within it."""

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        self._bench, self._num_tokens = bench, num_tokens
        self._flops = Work(bench.model, torch.float32, torch.float32).prefill_flops(num_tokens)
        self._seconds: list[float] = []
        self._peaks: list[float] = []
        self._shares: list[float] = []

    def measure(self) -> None:
        """Measure once more."""
        rates: list[float] = []
        prompt = self._bench.prompt(self._num_tokens)
        seconds = self._bench.first_token_seconds(prompt, lambda: rates.append(matrix_rate()))
        rates.append(matrix_rate())
        # The harmonic mean of the rates, because their times add up.
        peak = statistics.harmonic_mean(rates)
        self._seconds.append(seconds)
        self._peaks.append(peak)
        self._shares.append(self._flops / seconds / peak)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self._seconds)

    def rows(self, name: str) -> list[Row]:
        """Medians and extremes."""
        seconds, shares = self.median, self._shares
        return [
            Row(f"{name}: time", seconds * 1e3, "ms"),
            Row(f"{name}: tokens", self._num_tokens / seconds, "tokens/s"),
            Row(f"{name}: matrix products meanwhile", statistics.median(self._peaks) / 1e9, "GFLOP/s"),
            at_least(f"{name}: of the matrix products' rate", statistics.median(shares), "x", 0.75),
            Row(f"{name}: lowest share of a round", min(shares), "x"),
            Row(f"{name}: highest share of a round", max(shares), "x"),
        ]


def prefix_rows(bench: Bench, rounds: int, num_shared: int, num_own: int) -> list[Row]:
    """Two prompts that begin alike: the first is computed, and of the second only its own tokens."""
    computed, reused = [], []
    for _ in range(rounds):
        shared = bench.prompt(num_shared)
        computed.append(bench.first_token_seconds(shared + bench.prompt(num_own)))
        reused.append(bench.first_token_seconds(shared + bench.prompt(num_own)))
    name = f"prefix of {num_shared} tokens and {num_own} others"
    return [
        Row(f"{name}: first token", statistics.median(computed) * 1e3, "ms"),
        Row(f"{name}: first token, prefix in the cache", statistics.median(reused) * 1e3, "ms"),
        Row(f"{name}: times as fast", statistics.median(computed) / statistics.median(reused), "x"),
    ]


def adapter_rows(bench: Bench, context: int, rounds: int, num_steps: int) -> list[Row]:
    """Tokens a second of 16 sequences, and the share of them that adapters leave."""
    layout = bench.engine.info.adapter_layout
    n = NUM_ADAPTERS
    adapters = [pack_adapter(*random_wire(layout, RANK, seed), layout) for seed in range(n)]
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def decode(name: str, tasks: Sequence[int | None]) -> None:
        with bench.batch(n, context, tasks):
            bench.step_seconds(WARM_UP_STEPS)
            seconds[name] += bench.step_seconds(num_steps)

    for _ in range(rounds):
        decode("none", [None])
        for task, adapter in enumerate(adapters):
            bench.engine.put_adapter(task, adapter)
        decode("loaded, not used", [None])
        decode("one", [0])
        decode(f"{n} different", range(n))
        for task in range(n):
            bench.engine.loras.unload(task)
    rates = {name: n / statistics.median(values) for name, values in seconds.items()}
    goals = {"loaded, not used": 0.99, f"{n} different": 0.8}
    return [
        *(Row(f"adapters: {name}", rate, "tokens/s") for name, rate in rates.items()),
        *(
            at_least(f"adapters: {name}, against none", rate / rates["none"], "x", goals.get(name))
            for name, rate in rates.items()
            if name != "none"
        ),
    ]


def general_rows(checkpoint: Path, rounds: int, context: int, num_steps: int, **options: Any) -> list[Row]:
    """Steps by transformers' modules as shares of those by the engine's own layers, and beside transformers + PEFT."""
    benches = {name: Bench(checkpoint, model_implementation=name, **options) for name in ("native", "transformers")}
    layout = benches["transformers"].engine.info.adapter_layout
    for seed in range(NUM_ADAPTERS):
        benches["transformers"].engine.put_adapter(seed, pack_adapter(*random_wire(layout, RANK, seed), layout))
    peft = PeftDecode(checkpoint, NUM_ADAPTERS, RANK)
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for (name, bench), n in itertools.product(benches.items(), (1, NUM_ADAPTERS)):
            with bench.batch(n, context):
                bench.step_seconds(WARM_UP_STEPS)
                seconds[name, n] += bench.step_seconds(num_steps)
        with benches["transformers"].batch(NUM_ADAPTERS, context, range(NUM_ADAPTERS)):
            benches["transformers"].step_seconds(WARM_UP_STEPS)
            seconds["adapters", NUM_ADAPTERS] += benches["transformers"].step_seconds(num_steps)
        seconds["peft", NUM_ADAPTERS] += peft.step_seconds(context, num_steps)
    for bench in benches.values():
        bench.close()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return [
        *(
            at_least(
                f"general: decode {n}, of the engine's own layers",
                medians["native", n] / medians["transformers", n],
                "x",
                goal,
            )
            for n, goal in LEAST_GENERAL_SHARES.items()
        ),
        Row(
            f"general: {NUM_ADAPTERS} different adapters", NUM_ADAPTERS / medians["adapters", NUM_ADAPTERS], "tokens/s"
        ),
        Row("general: the same by transformers with PEFT", NUM_ADAPTERS / medians["peft", NUM_ADAPTERS], "tokens/s"),
        at_least(
            f"general: {NUM_ADAPTERS} different adapters, times transformers with PEFT",
            medians["peft", NUM_ADAPTERS] / medians["adapters", NUM_ADAPTERS],
            "x",
            LEAST_TIMES_PEFT,
        ),
    ]


def expert_rows(rounds: int, context: int, num_steps: int, **options: Any) -> list[Row]:
    """Tokens a second of a mixture with 16 sequences, and the share of them that adapters leave."""
    with tempfile.TemporaryDirectory(prefix="multilora-bench-") as directory:
        checkpoint = save_random_mixture(Path(directory))
        bench = Bench(checkpoint, **options | {"dtype": "bfloat16"})
        layout, n = bench.engine.info.adapter_layout, NUM_ADAPTERS
        on_attention = [module for module in layout.sites.plain_modules if module.module_id in _ATTENTION]
        for seed in range(n):
            on_all = pack_adapter(*random_wire(layout, RANK, seed), layout)
            bench.engine.put_adapter(n + seed, on_all)
            bench.engine.put_adapter(seed, pack_adapter(*random_wire(layout, RANK, seed, on_attention), layout))
        tasks: dict[str, Sequence[int | None]] = {
            "base": [None],
            "adapters on attention": range(n),
            "adapters on all": range(n, 2 * n),
        }
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for _, (name, of_rows) in itertools.product(range(rounds), tasks.items()):
            with bench.batch(n, context, of_rows):
                bench.step_seconds(WARM_UP_STEPS)
                seconds[name] += bench.step_seconds(num_steps)
        bench.close()
        peft = 1 / PeftMixture(checkpoint, RANK).seconds_a_token(context)
    rates = {name: n / statistics.median(values) for name, values in seconds.items()}
    return [
        *(Row(f"experts: {name}", rate, "tokens/s") for name, rate in rates.items()),
        Row("experts: the same by transformers with PEFT", peft, "tokens/s"),
        *(
            at_least(f"experts: {name}, of the base", rates[name] / rates["base"], "x", goal)
            for name, goal in LEAST_SHARES_OF_A_MIXTURE.items()
        ),
        at_least(
            "experts: adapters on all, times transformers with PEFT",
            rates["adapters on all"] / peft,
            "x",
            LEAST_TIMES_PEFT_OF_A_MIXTURE,
        ),
    ]


def save_random_mixture(path: Path) -> Path:
    """A checkpoint of OLMoE-1B-7B's shape (arXiv:2409.02060) with two layers and few tokens, random in bfloat16."""
    from safetensors.torch import save_file
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=_TINY_VOCABULARY,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=2048,
        architectures=["OlmoeForCausalLM"],
        dtype="bfloat16",
        eos_token_id=None,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in OlmoeForCausalLM(config).state_dict().items()}
    torch.manual_seed(7)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        if len(shape) > 1
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_plain_tokenizer(path, _TINY_VOCABULARY)
    return path


class PeftMixture:
    """transformers + PEFT in bfloat16 with one adapter on attention and all experts; PEFT mixes no adapters of experts
    in a batch."""

    def __init__(self, checkpoint: Path, rank: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        config = LoraConfig(
            r=rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self._model = get_peft_model(model, config).to(torch.bfloat16).eval()

    @torch.inference_mode()
    def seconds_a_token(self, context: int) -> float:
        """The seconds of one more token of one sequence, the median of three."""
        tokens = (torch.arange(context) % _TINY_VOCABULARY).view(1, context)
        cache = self._model(input_ids=tokens, use_cache=True).past_key_values

        def step() -> None:
            self._model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)

        return statistics.median(seconds_of(step) for _ in range(3))


class PeftDecode:
    """transformers + PEFT in float32: each row of a batch has an adapter of its own, on all linears."""

    def __init__(self, checkpoint: Path, num_adapters: int, rank: int) -> None:
        # Here: the other parts need no PEFT.
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
        self._names = [f"adapter {index}" for index in range(num_adapters)]
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model = get_peft_model(model, config, adapter_name=self._names[0]).eval()
        for name in self._names[1:]:
            self._model.add_adapter(name, config)

    @torch.inference_mode()
    def step_seconds(self, context: int, num_steps: int) -> list[float]:
        """The seconds of each of some steps after a prompt of `context` tokens and `WARM_UP_STEPS` steps."""
        tokens = (
            torch.arange(len(self._names) * context).view(len(self._names), context) % self._model.config.vocab_size
        )
        cache = self._model(input_ids=tokens, adapter_names=self._names, use_cache=True).past_key_values

        def step() -> None:
            self._model(
                input_ids=tokens[:, :1], adapter_names=self._names, past_key_values=cache, use_cache=True
            ).logits[:, -1].argmax(-1)

        return [seconds_of(step) for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:]


def overhead_rows(rounds: int, num_steps: int, num_sequences: int) -> list[Row]:
    """Milliseconds of a step outside of the model's forward pass and its logits."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    kinds = {"greedy": GREEDY, "mixed sampling": MIXED}
    num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="multilora-bench-") as directory:
        bench = Bench(save_tiny_model(Path(directory)), num_threads=1, kv_cache_memory_bytes=64 << 20)
        for _, (kind, sampling) in itertools.product(range(rounds), kinds.items()):
            with bench.batch(num_sequences, 32, sampling=sampling), model_seconds() as of_model:
                of_steps = bench.step_seconds(num_steps)
            values[kind].append((sum(of_steps) - sum(of_model)) / num_steps)
        bench.close()
    torch.set_num_threads(num_threads)
    return [
        at_most(f"overhead of {num_sequences}, {kind}", statistics.median(of_kind) * 1e3, "ms", MAX_OVERHEAD_MS)
        for kind, of_kind in values.items()
    ]


@contextmanager
def model_seconds() -> Iterator[list[float]]:
    """The seconds of each call of a model, in the list that is given."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - started)

        return call

    with (
        mock.patch.object(Decoder, "forward", timed(Decoder.forward)),
        mock.patch.object(Decoder, "logits", timed(Decoder.logits)),
    ):
        yield seconds


def save_tiny_model(path: Path) -> Path:
    """One narrow layer, so that a step is nearly all overhead; with a tokenizer, because tokens become text."""
    shape = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": _TINY_VOCABULARY, "max_position_embeddings": 2048}
    save_tiny_llama(path, **shape, initializer_range=1.0)  # as sure of its next token as a trained model
    save_plain_tokenizer(path, _TINY_VOCABULARY)
    return path


def write_steps_table(rows: Sequence[Row], source: str) -> None:
    """Write the rows of the part `decode` into the page, and draw the page's plots anew.

    source: the sentence that tells where the figures are from.
    """
    limits = (row for row in rows if row.what.startswith(_MACHINE))
    told = ", ".join(f"{row.what.removeprefix(_MACHINE)} {figure(row.value)} {row.unit}" for row in limits)
    sentences = [source, f"The machine meanwhile: {told}."]
    if missed := [row for row in rows if row.is_met is False and not row.what.endswith(_OF_THE_LIMIT)]:
        sentences.append(f"Missed: {'; '.join(f'{row.what} {row.cell} (goal {row.goal})' for row in missed)}.")
    write_table(PERFORMANCE, "steps", steps_table(rows), " ".join(sentences))
    write_plots(PERFORMANCE)


def steps_table(rows: Sequence[Row]) -> str:
    """A row for each number of sequences; for each kind of weights the time of a step, and its multiple of the limit.

    The plot of the page finds the columns by this order.
    """
    steps = {row.what.removeprefix("decode "): row for row in rows if row.what.startswith("decode ")}
    keys = [name.removesuffix(_OF_THE_LIMIT).split(", ") for name in steps if name.endswith(_OF_THE_LIMIT)]
    counts, kinds = sorted({int(count) for count, _ in keys}), list(dict.fromkeys(kind for _, kind in keys))
    columns = ["sequences"]
    for kind in kinds:
        heading = f"weights in {kind}" if kind in ("bfloat16", "float16") else kind
        columns += [heading, f"{heading}, of the limit"]
    lines = []
    for count in counts:
        of_count = [steps[f"{count}, {kind}{which}"] for kind in kinds for which in ("", _OF_THE_LIMIT)]
        lines.append([str(count), *(_step_cell(row) for row in of_count)])
    return markdown_table(columns, lines, numbers=range(len(columns)))


def _step_cell(row: Row) -> str:
    return row.cell if row.unit == "ms" else f"{row.value:.2f}x{', missed' if row.is_met is False else ''}"


def main(
    output: Annotated[Path, typer.Option(help="Folder for engine.csv.")] = Path("bench_results"),
    part: Annotated[
        list[str],
        typer.Option(
            help="Measure only this: decode, bfloat16, prefill, prefix, adapters, general, experts, encoder-decoder, "
            "overhead."
        ),
    ] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Repetitions of everything that is compared.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of one repetition.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens of each sequence when decoding starts.")] = 128,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt that prefill measures.")] = 2048,
    chunk: Annotated[int, typer.Option(help="`max_num_batched_tokens` of the engine.")] = CHUNK,
    dtype: Annotated[str, typer.Option(help="`dtype` of the engine: float32, bfloat16 or float16.")] = "float32",
    lora_dtype: Annotated[str, typer.Option(help="`lora_dtype` of the engine, or auto, which is `dtype`.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is one per core.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; default: the embedded model.")] = None,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the table and plot of docs/performance.md; needs the part decode.")
    ] = False,
) -> None:
    """Measure the engine's steps, and print a table with the goals."""
    source = measured_source() if update_docs else ""
    console = Console()
    checkpoint = model or ensure_default_checkpoint()
    stored_as = ("float32", "bfloat16") if dtype == "float32" else (dtype,)
    quantized: dict[str, Path] = {
        scheme: ensure_quantized_checkpoint(scheme) for scheme in QUANTIZED if not model and dtype == "float32"
    }
    options: dict[str, Any] = {"dtype": dtype, "num_threads": threads, "max_num_batched_tokens": chunk}
    with console.status("loading the model"):
        benches = {weights: Bench(checkpoint, lora_dtype, weight_dtype=weights, **options) for weights in stored_as}
        benches |= {scheme: Bench(path, lora_dtype, **options) for scheme, path in quantized.items()}
    bench = benches[dtype]
    parts: dict[str, Callable[[], list[Row]]] = {
        "decode": lambda: decode_rows(benches, TORCH_DTYPES[dtype], rounds, context, steps),
        "bfloat16": lambda: bfloat16_rows({"bfloat16": checkpoint, **quantized}, rounds, context, steps, **options),
        "prefill": lambda: prefill_rows(benches, rounds, prompt),
        "prefix": lambda: prefix_rows(bench, rounds, num_shared=1000, num_own=32),
        "adapters": lambda: adapter_rows(bench, context, rounds, steps),
        "general": lambda: general_rows(checkpoint, rounds, context, steps, **options),
        "experts": lambda: expert_rows(rounds, context, steps, **options),
        "encoder-decoder": lambda: encoder_decoder_rows(rounds, steps, **options),
        "overhead": lambda: overhead_rows(rounds, steps, 64),
    }
    if update_docs and part and "decode" not in part:
        raise typer.BadParameter("--docs writes the table of the part decode, which --part leaves out")
    if unknown := set(part) - set(parts):
        raise typer.BadParameter(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    with Progress(console=console) as progress:
        chosen = progress.track(part or list(parts), description="measuring")
        results = {name: parts[name]() for name in chosen}
    for engine in benches.values():
        engine.close()
    stored = bench.engine.info.adapter_layout.lora_dtype
    title = f"{checkpoint.name}, {dtype}, adapters in {stored}, {threads_title()}"
    report([*itertools.chain.from_iterable(results.values())], title, output, "engine", console)
    if update_docs:
        write_steps_table(results["decode"], source)
