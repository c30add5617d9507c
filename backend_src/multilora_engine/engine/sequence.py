"""`Sequence`: the engine's own mutable state of one request; it never leaves the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TypeVar

import torch

from multilora_engine.engine.beam_search import BeamSearch
from multilora_engine.engine.block_table import BlockTable
from multilora_engine.engine.held_outputs import HeldOutputs, PromptReport
from multilora_engine.lora.cached_adapter import CachedAdapter
from multilora_engine.request import GenerationRequest, PerfMetrics, TokenLogProb
from multilora_engine.sampling.guided import GuideMatcher
from multilora_engine.sampling.token_history import TokenHistory
from multilora_engine.text.text_stream import TextStream

Result = TypeVar("Result")


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """When things happened to a request, in nanoseconds of the monotonic clock; 0: not yet. Written by the engine."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def note_step(self, now_ns: int) -> None:
        """A step computes tokens of the request."""
        self.first_scheduled_ns = self.first_scheduled_ns or now_ns

    def note_token(self, now_ns: int) -> None:
        """The answer has one more token."""
        self.first_token_ns = self.first_token_ns or now_ns
        self.last_token_ns = now_ns


@dataclass(eq=False, slots=True)
class Sequence:
    """The engine's state of one request. A field or a struct of fields has one writer.

    arrival: place in the order of arrival, unique.
    adapter: pinned from acceptance to the end; None is the base model.
    text: decides which tokens and text may leave.
    max_output_tokens: how long its answer may become.
    bias: `embedding_bias` on the device, token ids int64 [n] and biases float32 [n].
    has_host_work: whether its tokens are charged by `HostWork`.
    search: the beam search it belongs to. The sequence of the request is its first beam and stands for all of them:
        only its `status`, `times` and place in the queues count.

    Written by `Admission`:
    guide: decides which tokens may come next; None lets any, and before the start means that it is not compiled yet.
        Like `text` it survives a preemption.

    Written by `Engine` and `Answers`:
    output_token_ids: the answer so far.
    num_pending_tokens: tokens of the answer that a step in flight chooses: they count, but are not known yet.
    times, held: see there.

    Written by `Scheduler`:
    status.
    num_computed_tokens: tokens whose keys and values are in the cache.
    num_overtakes: sequences with an adapter that were admitted before this one although they came later.
    is_late: whether its prompt has waited longer than any should.
    last_turn: number of the last turn that it had where the sequences of its client take turns; by `Pace`.

    Each written by one other:
    block_table: by the block allocator. prompt_report: by the model runner.
    num_charged_tokens: tokens that count as served to its client and adapter; by the fair queue.
    host_debt_s: seconds that its tokens took of the engine's thread beyond its share; by `HostWork`.
    history: of its tokens, once a penalty or a bad word asks for it; by logits.py.
    siblings: of the first beam, the other ones; by `continue_beams`. score: the sum of a beam's log-probs; likewise.

    Written by whoever does a step's work for it on the host, such as `for_each_alone`:
    failure: the exception that this work raised: the request ends by it when the step is read.
    """

    request: GenerationRequest
    arrival: int
    adapter: CachedAdapter | None
    text: TextStream
    random: Random
    max_output_tokens: int
    guide: GuideMatcher | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed_tokens: int = 0
    num_charged_tokens: int = 0
    num_overtakes: int = 0
    is_late: bool = False
    last_turn: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    times: Times = field(default_factory=Times)
    history: TokenHistory | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    has_host_work: bool = False
    host_debt_s: float = 0.0
    held: HeldOutputs = field(default_factory=HeldOutputs)
    prompt_report: PromptReport = field(default_factory=PromptReport)
    search: BeamSearch | None = None
    siblings: list[Sequence] = field(default_factory=list)
    score: float = 0.0
    failure: Exception | None = None

    @property
    def beams(self) -> list[Sequence]:
        """The sequences that are computed for the request: this one and, in a beam search, the other beams."""
        return [self, *self.siblings]

    @property
    def width(self) -> int:
        """The largest number of `beams`."""
        return self.request.sampling.beam_width

    @property
    def log_probs(self) -> list[TokenLogProb]:
        """For a beam, the values of all its tokens: none leaves before the search ends."""
        return self.held.log_probs

    def sibling(self) -> Sequence:
        """A further beam of the same search, without tokens or blocks yet."""
        return Sequence(
            request=self.request,
            arrival=self.arrival,
            adapter=self.adapter,
            text=self.text,
            random=self.random,
            max_output_tokens=self.max_output_tokens,
            bias=self.bias,
            search=self.search,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to compute: its answer is as long as it may become, with any pending tokens.

        An answer without tokens is so from the start; its prompt is computed all the same.
        """
        num_output_tokens = len(self.output_token_ids) + self.num_pending_tokens
        is_prompt_computed = self.num_computed_tokens >= len(self.request.prompt_token_ids)
        return is_prompt_computed and num_output_tokens >= self.max_output_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens start .. end - 1 of prompt and answer; pending ones are missing at the end."""
        prompt = self.request.prompt_token_ids
        if start >= len(prompt):
            return self.output_token_ids[start - len(prompt) : end - len(prompt)]
        return (prompt[start:end] + self.output_token_ids)[: end - start]

    @property
    def perf(self) -> PerfMetrics:
        epoch_ns = time.time_ns() - time.monotonic_ns()

        def since_epoch(monotonic_ns: int) -> int:
            return monotonic_ns and epoch_ns + monotonic_ns

        num_blocks = sum(beam.block_table.num_allocated for beam in self.beams)
        num_reused_blocks = sum(beam.block_table.num_reused for beam in self.beams)
        return PerfMetrics(
            arrival_time_ns=since_epoch(self.times.arrival_ns),
            first_scheduled_time_ns=since_epoch(self.times.first_scheduled_ns),
            first_token_time_ns=since_epoch(self.times.first_token_ns),
            last_token_time_ns=since_epoch(self.times.last_token_ns),
            kv_cache_alloc_total_blocks=num_blocks,
            kv_cache_alloc_new_blocks=num_blocks - num_reused_blocks,
            kv_cache_reused_blocks=num_reused_blocks,
        )


def for_each_alone(
    rows: Iterable[tuple[int, Sequence]], work: Callable[[Sequence], Result]
) -> list[tuple[int, Result]]:
    """The host's work of a step for each of some sequences, by row. A sequence whose work raises has failed: it is left
    out, here and from then on, and the work of all others is done.
    """
    done = []
    for row, sequence in rows:
        if sequence.failure is None:
            try:
                done.append((row, work(sequence)))
            except Exception as error:
                sequence.failure = error
    return done
