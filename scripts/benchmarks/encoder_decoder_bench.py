"""T5 and BART with random weights: an engine's answers and steps beside those of transformers and PEFT."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.adapter_bench import random_wire
from benchmarks.engine_bench import NUM_ADAPTERS, RANK, WARM_UP_STEPS, Bench, RepeatedLimits
from benchmarks.machine_limits import Limits, seconds_of
from benchmarks.results import Row, at_least, at_most
from checkpoints.telling_adapters import save_plain_tokenizer
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, SamplingParams

SHAPES: Mapping[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "T5-small": (T5ForConditionalGeneration, T5Config.from_dict({"decoder_start_token_id": 0})),
    "BART-base": (
        BartForConditionalGeneration,
        BartConfig(
            vocab_size=50265,
            d_model=768,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
            forced_eos_token_id=None,
        ),
    ),
}
"""The models: T5's own defaults are T5-small's shape."""

NUM_SOURCES, SOURCE_TOKENS, ANSWER_TOKENS = NUM_ADAPTERS, 64, 32

LEAST_TIMES_IN_TURN, LEAST_TIMES_MIXED, MAX_LIMITS = 4.0, 1.5, 1.6
"""The goals: times PEFT's tokens a second, one request after another and in one batch; and a step's limits."""

_CROSS_INPUTS = ("EncDecAttention.k", "EncDecAttention.v", "encoder_attn.k_proj", "encoder_attn.v_proj")
"""Linears of the decoder that only read the source."""


def encoder_decoder_rows(rounds: int, num_steps: int, answer_tokens: int = ANSWER_TOKENS, **options: Any) -> list[Row]:
    """Answers and steps of each model."""
    rows = []
    for name, (model_class, config) in SHAPES.items():
        with tempfile.TemporaryDirectory(prefix="multilora-bench-") as directory:
            checkpoint = save_random_model(Path(directory), model_class, config)
            rows += _rows_of_model(name, checkpoint, rounds, num_steps, answer_tokens, **options)
    return rows


def save_random_model(path: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    """A checkpoint of float32 with random weights, and a tokenizer."""
    torch.manual_seed(7)
    model_class(config).save_pretrained(path)
    save_plain_tokenizer(path, config.vocab_size)
    return path


def _rows_of_model(
    name: str, checkpoint: Path, rounds: int, num_steps: int, answer_tokens: int, **options: Any
) -> list[Row]:
    bench, peft, limits = Bench(checkpoint, **options), PeftAnswers(checkpoint), RepeatedLimits()
    layout = bench.engine.info.adapter_layout
    for seed in range(NUM_ADAPTERS):
        bench.engine.put_adapter(seed, pack_adapter(*random_wire(layout, RANK, seed), layout))
    contestants: dict[str, Callable[[list[list[int]], int], object]] = {
        "base": partial(answer_all, bench, [None] * NUM_SOURCES),
        "base by transformers": peft.base,
        f"{NUM_ADAPTERS} different adapters": partial(answer_all, bench, range(NUM_ADAPTERS)),
        "the same by PEFT, one after another": peft.in_turn,
        "the same by PEFT, in one batch": peft.mixed,
    }
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    steps: list[float] = []
    for _ in range(rounds):
        # No source is in a cache yet.
        sources = [bench.prompt(SOURCE_TOKENS) for _ in range(NUM_SOURCES)]
        for contestant, answers in contestants.items():
            seconds[contestant].append(seconds_of(partial(answers, sources, answer_tokens)))
        limits.measure()
        with bench.batch(NUM_SOURCES, 1, source_tokens=SOURCE_TOKENS):
            bench.step_seconds(WARM_UP_STEPS)
            steps += bench.step_seconds(num_steps)
    bench.close()
    rates = {what: NUM_SOURCES * answer_tokens / statistics.median(values) for what, values in seconds.items()}
    base, base_of_others, own, in_turn, mixed = rates.values()
    step, context = statistics.median(steps), 1 + WARM_UP_STEPS + num_steps // 2
    limit = step_limit(peft.model, [context] * NUM_SOURCES, SOURCE_TOKENS, limits.limits)
    return [
        *(Row(f"{name}: {what}", rate, "tokens/s") for what, rate in rates.items()),
        Row(f"{name}: base, times transformers", base / base_of_others, "x"),
        Row(f"{name}: {NUM_ADAPTERS} different adapters, of the base", own / base, "x"),
        at_least(f"{name}: adapters, times PEFT one after another", own / in_turn, "x", LEAST_TIMES_IN_TURN),
        at_least(f"{name}: adapters, times PEFT in one batch", own / mixed, "x", LEAST_TIMES_MIXED),
        Row(f"{name}: decode {NUM_SOURCES}", step * 1e3, "ms"),
        at_most(f"{name}: decode {NUM_SOURCES}, of the limit", step / limit, "x", MAX_LIMITS),
    ]


def answer_all(
    bench: Bench, tasks: Sequence[int | None], sources: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """Greedy answers to sources that come at once, each with the adapter of its task."""
    model = bench.model
    assert model.source is not None
    answers: dict[str, list[int]] = {}
    for i, (source, task) in enumerate(zip(sources, tasks, strict=True)):
        beginning, params = [model.source.decoder_start_token_id], SamplingParams(num_tokens, end_id=-1)
        request = GenerationRequest(f"answer-{i}", beginning, params, task, source_token_ids=source)
        answers[request.request_id] = []
        bench.engine.add_request(request)
    while bench.engine.has_work:
        for output in bench.engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


class PeftAnswers:
    """transformers in float32, and PEFT with random adapters on all linears."""

    def __init__(self, checkpoint: Path, num_adapters: int = NUM_ADAPTERS, rank: int = RANK) -> None:
        self.model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
        self._names = [f"adapter {index}" for index in range(num_adapters)]
        adapted = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._adapted = get_peft_model(adapted, config, adapter_name=self._names[0]).eval()
        for name in self._names[1:]:
            self._adapted.add_adapter(name, config)

    def base(self, sources: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The model's answers, in one batch."""
        return self._answers(self.model, sources, num_tokens)

    def in_turn(self, sources: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Source i by adapter i, one source after another."""
        answers = []
        for name, source in zip(self._names, sources, strict=True):
            self._adapted.set_adapter(name)
            answers += self._answers(self._adapted, [source], num_tokens)
        return answers

    def mixed(self, sources: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The same in one batch, with padding."""
        return self._answers(self._adapted, sources, num_tokens, adapter_names=self._names)

    @torch.inference_mode()
    def _answers(self, model: Any, sources: list[list[int]], num_tokens: int, **arguments: Any) -> list[list[int]]:
        pad, longest = model.config.pad_token_id, max(map(len, sources))
        # Every answer has all of its tokens.
        model.generation_config.eos_token_id = None
        options = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=pad,
            decoder_start_token_id=model.config.decoder_start_token_id,
        )
        answers = model.generate(
            input_ids=torch.tensor([source + [pad] * (longest - len(source)) for source in sources]),
            attention_mask=torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources]),
            generation_config=options,
            **arguments,
        )
        assert answers.shape == (len(sources), 1 + num_tokens)
        return answers[:, 1:].tolist()  # type: ignore[no-any-return]


def step_limit(model: PreTrainedModel, contexts: Sequence[int], source_tokens: int, limits: Limits) -> float:
    """The least seconds for one token of each of the sequences with so many keys, and so many of their sources."""
    weights = sum(
        module.weight.numel()
        for name, module in itertools.chain(model.get_decoder().named_modules(), [("head", model.lm_head)])
        if isinstance(module, torch.nn.Linear) and not name.endswith(_CROSS_INPUTS)
    )
    config: Any = model.config
    heads = getattr(config, "num_heads", None) or config.decoder_attention_heads
    width = heads * getattr(config, "d_kv", config.d_model // heads)
    keys = sum(contexts) + len(contexts) * source_tokens
    layers = getattr(config, "num_decoder_layers", None) or config.decoder_layers
    num_bytes = (weights + 2 * layers * width * keys) * torch.float32.itemsize
    return limits.seconds(num_bytes, 2 * weights * len(contexts) + 4 * layers * width * keys)
