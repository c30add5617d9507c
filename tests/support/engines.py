"""Driving an in-process engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from multilora_engine.engine.engine import Engine
from multilora_engine.execution.model_runner import ModelRunner
from multilora_engine.request import GenerationRequest, TokenLogProb, TokenOutput
from multilora_engine.sampling.sampler import Choice
from multilora_engine.sequences.sequence import ScheduledSequence
from multilora_kernels import kv_head_dim
from multilora_kernels.kv_rows import LARGEST_CODES, quantize_rows


@dataclass
class Answer:
    """Everything one request got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: bytes = b""
    final: TokenOutput | None = None

    def add(self, output: TokenOutput) -> None:
        assert self.final is None, "an output after the final one"
        self.token_ids += output.token_ids
        self.text += output.text
        self.log_probs += output.log_probs
        assert not (self.prompt_log_probs and output.prompt_log_probs), "the prompt is told of twice"
        self.prompt_log_probs += output.prompt_log_probs
        self.final = output if output.is_final else None


def run_all(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, Answer]:
    """Add all requests, step until nothing is left, check integrity after every step."""
    answers = {}
    for request in requests:
        engine.add_request(request)
        answers[request.request_id] = Answer()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
        engine.check_integrity()
    assert_idle(engine)
    assert all(answer.final is not None for answer in answers.values())
    return answers


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request: no block, no pin, no place in a queue."""
    stats = engine.stats
    assert (stats.num_waiting, stats.num_running, stats.num_pins) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def poison_claimed_blocks(engine: Engine) -> None:
    """Fill every block with NaN when it gets a new user: what was computed for another sequence must never count."""
    blocks, kv_cache = engine._blocks, engine._runner._kv_cache
    claim = blocks._claim

    def claim_and_poison() -> int:
        block = claim()
        slots = slice(block * blocks.block_size, (block + 1) * blocks.block_size)
        for cache in (kv_cache.keys, kv_cache.values):
            nothing = torch.full((*cache.shape[2:-1], kv_head_dim(cache)), torch.nan)
            if cache.dtype in LARGEST_CODES:
                cache.view(torch.uint8)[:, slots] = quantize_rows(nothing, cache.dtype).view(torch.uint8)
            else:
                cache[:, slots] = nothing.to(cache.dtype)
        return block

    blocks._claim = claim_and_poison  # type: ignore[method-assign]


class LogitsRecorder:
    """Keeps the logits that chose each token: `rows[request_id]` is a list of [vocab] tensors."""

    def __init__(self, engine: Engine) -> None:
        self.rows: dict[str, list[torch.Tensor]] = {}
        self._runner: ModelRunner = engine._runner
        self._launch = self._runner.launch
        # The last call of a step has the rows that are sampled.
        model = self._runner._model
        model.forward, model.logits = map(self._recorded, (model.forward, model.logits))  # type: ignore[method-assign]
        self._runner.launch = self._record_rows  # type: ignore[method-assign]

    def _recorded(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(*args: object, **options: object) -> torch.Tensor:
            self._logits = compute(*args, **options)
            return self._logits

        return record

    def _record_rows(self, step: list[ScheduledSequence], *more: Any) -> Choice:
        choice = self._launch(step, *more)
        for row, sequence in enumerate(choice.sequences):
            self.rows.setdefault(sequence.request.request_id, []).append(self._logits[row].clone())
        return choice
