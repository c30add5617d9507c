"""`Sequence`: the engine's own mutable state of one request. It never leaves the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from multilora_engine.guides.guided import GuideMatcher
from multilora_engine.lora.adapter_state import CachedAdapter
from multilora_engine.request import GenerationRequest, PerfMetrics, TokenLogProb
from multilora_engine.sequences.beam_search import BeamSearch
from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.sequences.token_history import TokenHistory
from multilora_engine.text.text_stream import TextStream


@dataclass(slots=True)
class HeldOutputs:
    """Values of an answer's tokens that have not left yet. A list stays empty if the request did not ask for it.

    Written by `Answers` and, for beams, by `continue_beams`.

    logits: rows of float32. cum_log_prob: the sum of the log-probs of the tokens that have left.
    """

    log_probs: list[TokenLogProb] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    cum_log_prob: float = 0.0

    def release_log_probs(self, num_tokens: int) -> list[TokenLogProb]:
        """The log-probs of the next `num_tokens` tokens that leave."""
        if not self.log_probs:
            return []
        released, self.log_probs = self.log_probs[:num_tokens], self.log_probs[num_tokens:]
        self.cum_log_prob += sum(token.log_prob for token in released)
        return released

    def release_logits(self, num_tokens: int) -> bytes:
        """The logits of the next `num_tokens` tokens that leave."""
        if not self.logits:
            return b""
        released, self.logits = self.logits[:num_tokens], self.logits[num_tokens:]
        return b"".join(released)


@dataclass(slots=True)
class PromptReport:
    """Values of a prompt's first tokens, as far as they are computed. Written by the model runner.

    logits: rows of float32 that have not left.
    num_logits: the number of rows so far, including rows that have left.
    log_probs: None if they have left, or if the request did not ask for them.
    """

    logits: list[bytes] = field(default_factory=list)
    num_logits: int = 0
    log_probs: PromptLogProbs | None = None

    def append_logits(self, rows: bytes, num_rows: int) -> None:
        """The logits of the prompt's next tokens."""
        self.logits.append(rows)
        self.num_logits += num_rows

    def release_logits(self) -> bytes:
        """The logits that have come since the last call."""
        if not self.logits:
            return b""
        released, self.logits = self.logits, []
        return b"".join(released)

    def release_log_probs(self) -> bytes:
        """The log-probs of the whole prompt, once, as soon as all are known."""
        if self.log_probs is None or not self.log_probs.is_complete:
            return b""
        released, self.log_probs = self.log_probs.to_bytes(), None
        return released


BlockIds = list[int] | NDArray[np.int64]

_MIN_ROOM = 16
"""The number of blocks for which a new table has room."""


class BlockTable:
    """The blocks of a sequence's tokens, in order: token t is in block t // block_size. Written by `BlockAllocator`.

    The ids lie in an array that grows by doubling. So a step copies them whole, and the cost hardly depends on their
    number.

    keys: the keys of the first full blocks, as far as the allocator has needed them.
    weights_version: the allocator's version of the weights when the sequence started.
    num_starts: how often it has started: after a preemption it has other blocks.
    num_allocated: how many blocks the sequence was ever given.
    num_reused: how many of these came with the keys and values of its tokens.
    num_cached_tokens: how many of its tokens had keys and values when it first started.
    """

    __slots__ = (
        *("_ids", "keys", "length", "num_allocated", "num_cached_tokens", "num_reused", "num_starts"),
        "weights_version",
    )

    def __init__(self) -> None:
        self._ids: NDArray[np.int64] = np.empty(_MIN_ROOM, np.int64)
        self.length = 0
        self.keys: list[bytes] = []
        self.num_allocated = 0
        self.num_reused = 0
        self.num_cached_tokens = 0
        self.num_starts = 0
        self.weights_version = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.ids[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids of the blocks, [length] int64. The array is valid until the table changes."""
        return self._ids[: self.length]

    def slot(self, position: int, block_size: int) -> int:
        """The place of a token's keys and values in the KV cache."""
        assert position < self.length * block_size
        return self._ids.item(position // block_size) * block_size + position % block_size

    def extend(self, blocks: BlockIds) -> None:
        """Append blocks."""
        length = self.length + len(blocks)
        if length > len(self._ids):
            self._ids = np.concatenate([self.ids, np.empty(length, np.int64)])
        self._ids[self.length : length] = blocks
        self.length = length

    def replace(self, blocks: BlockIds, keys: list[bytes]) -> None:
        """Replace all blocks and keys by these."""
        self.clear()
        self.extend(blocks)
        self.keys = list(keys)

    def clear(self) -> None:
        """Drop all blocks. The keys stay, because tokens never change."""
        self.length = 0


@dataclass(eq=False, slots=True)
class Source:
    """The text that the encoder of an encoder-decoder model reads for a sequence. All beams of a search have one.

    Written by `BlockAllocator`:
    block_table: of the keys and values that cross attention reads; the table is empty while no beam has blocks.
    key: what the keys of the blocks follow from; empty until the allocator has needed it.
    num_users: how many beams have blocks of their own.
    is_computed: whether the keys and values of all tokens are in the cache. `Scheduler` writes it, too.
    """

    token_ids: list[int]
    block_table: BlockTable = field(default_factory=BlockTable)
    key: bytes = b""
    num_users: int = 0
    is_computed: bool = False


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """An order to copy the keys and values of block `source` into block `target`."""

    source: int
    target: int


Result = TypeVar("Result")


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """When things happened to a request, in ns of the monotonic clock; 0 means not yet. Written by the engine."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def note_step(self, now_ns: int) -> None:
        """Note that a step computes tokens of the request."""
        self.first_scheduled_ns = self.first_scheduled_ns or now_ns

    def note_token(self, now_ns: int) -> None:
        """Note that the answer has one more token."""
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
    has_host_work: whether its client is charged for the host's work on its tokens.
    source: None for a model without an encoder.
    search: the beam search it belongs to. The sequence of the request is its first beam and stands for all of them:
        only its `status`, `times` and place in the queues count.

    Written by `Admission`:
    lora_start: the position from which on the adapter computes; the base computes all tokens before that. It never
        moves: neither chunks nor a preemption nor the tokens of the answer change it.
    guide: decides which tokens may come next; None lets any, and before the start means that it is not compiled yet.
        Like `text` it survives a preemption.

    Written by `Engine` and `Answers`:
    output_token_ids: the answer so far.
    num_pending_tokens: tokens of the answer that a step in flight chooses: they count, but are not known yet.
    times, held: see there.

    Written by `Scheduler`:
    status.
    num_computed_tokens: tokens whose keys and values are in the cache.
    num_lost_tokens: of its first tokens, how many had been computed before a preemption lost them.
    num_overtakes: sequences with an adapter that were admitted before this one although they came later.
    last_turn: number of the last turn that it had where the sequences of its client take turns.

    Written by accounts.py:
    place: in the line of its client and adapter.
    host_debt_s: seconds that its tokens took of the engine's thread beyond its share.

    Each written by one other:
    block_table: by the block allocator. prompt_report: by the model runner.
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
    lora_start: int = 0
    guide: GuideMatcher | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed_tokens: int = 0
    num_lost_tokens: int = 0
    num_overtakes: int = 0
    last_turn: int = 0
    place: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    times: Times = field(default_factory=Times)
    history: TokenHistory | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    has_host_work: bool = False
    host_debt_s: float = 0.0
    source: Source | None = None
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
            lora_start=self.lora_start,
            bias=self.bias,
            source=self.source,
            search=self.search,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache, with those of the source."""
        return self.num_tokens - self.num_computed_tokens + self.num_missing_source_tokens

    @property
    def num_missing_source_tokens(self) -> int:
        """Tokens of the source that are to be encoded: all or none."""
        return 0 if self.source is None or self.source.is_computed else len(self.source.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """How many of the tokens that `GenerationRequest.num_prompt_tokens` counts were in the cache at the start."""
        table = self.block_table if self.source is None else self.source.block_table
        return table.num_cached_tokens

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may come next; None lets any."""
        return self.forced_token(len(self.output_token_ids) + self.num_pending_tokens)

    def forced_token(self, place: int) -> int | None:
        """The only token that the answer may have in a place, from 0 on; None lets any."""
        sampling = self.request.sampling
        if sampling.forced_last_id is not None and place == self.max_output_tokens - 1:
            return sampling.forced_last_id
        return sampling.forced_first_id if place == 0 else None

    @property
    def is_full(self) -> bool:
        """Whether its answer is as long as it may become."""
        return len(self.output_token_ids) >= self.max_output_tokens

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

        tables = [beam.block_table for beam in self.beams]
        if self.source is not None:
            tables.append(self.source.block_table)
        num_blocks = sum(table.num_allocated for table in tables)
        num_reused_blocks = sum(table.num_reused for table in tables)
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
    """Do the host's work of a step for each sequence. Returns the results, each with the row of its sequence.

    A sequence whose work raises has failed: it is left out here and from then on. The others go on.
    """
    done = []
    for row, sequence in rows:
        if sequence.failure is None:
            try:
                done.append((row, work(sequence)))
            except Exception as error:
                sequence.failure = error
    return done


class ScheduledSequence(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from position `start` on.

    start: the sequence's `num_computed_tokens` when it was scheduled.
    is_sampled: whether the step computes the sequence's last token, so that the logits give the next token.
    encodes_source: whether the step encodes the sequence's source before.
    num_starts: of the sequence's `BlockTable`, whose blocks the step writes.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool
    encodes_source: bool = False
    num_starts: int = 0

    @property
    def num_source_tokens(self) -> int:
        """Tokens of the source that the step encodes."""
        source = self.sequence.source
        return len(source.token_ids) if self.encodes_source and source is not None else 0

    @property
    def is_decode(self) -> bool:
        """Whether the part is one token of the answer. All other parts use the attention of prompts.

        So an answer has the same bits however its prompt was cut, even into pieces of one token.
        """
        return self.num_tokens == 1 and self.start >= len(self.sequence.request.prompt_token_ids)

    @property
    def num_base_tokens(self) -> int:
        """How many of these tokens, the first ones, the base computes although the sequence has an adapter."""
        return min(self.num_tokens, max(0, self.sequence.lora_start - self.start))

    @property
    def context_positions(self) -> range:
        """The prompt's tokens in this step whose logits the request wants and did not get before a preemption."""
        sequence = self.sequence
        if not sequence.request.sampling.return_context_logits or sequence.output_token_ids:
            return range(0)
        return range(max(self.start, sequence.prompt_report.num_logits), self.start + self.num_tokens)

    @property
    def scored_positions(self) -> range:
        """The prompt's positions in this step whose next token needs a log-prob that is not known yet."""
        log_probs = self.sequence.prompt_report.log_probs
        return range(0) if log_probs is None else log_probs.missing(self.start, self.start + self.num_tokens)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of this part, without a pending token."""
        return self.sequence.token_ids(self.start, self.start + self.num_tokens)
