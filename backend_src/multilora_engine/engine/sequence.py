"""`Sequence`: the engine's own mutable state of one request; it never leaves the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING

from multilora_engine.request import GenerationRequest, PerfMetrics, TokenLogProb

if TYPE_CHECKING:
    import torch

    from multilora_engine.engine.beam_search import BeamSearch
    from multilora_engine.lora.host_tier import CachedAdapter
    from multilora_engine.sampling.guided import GuideMatcher
    from multilora_engine.sampling.prompt_log_probs import PromptLogProbs
    from multilora_engine.sampling.token_history import TokenHistory
    from multilora_engine.text.text_stream import TextStream


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """The engine's state of one request.

    arrival: place in the order of arrival, unique.
    adapter: pinned from acceptance to the end; None is the base model.
    text: decides which tokens and text may leave.
    max_output_tokens: how long its answer may become.
    guide: decides which tokens may come next; None lets any, and before the start means that it is not compiled yet.
        Like `text` it survives a preemption.
    num_pending_tokens: tokens of the answer that a step in flight chooses: they count, but are not known yet; written
        by the engine only, as are `output_token_ids`.
    num_computed_tokens: tokens whose keys and values are in the cache; written by the scheduler only.
    num_charged_tokens: tokens that count as served to its adapter; written by the fair queue only.
    num_overtakes: sequences with an adapter that were admitted before this one although they came later.
    arrival_time_ns .. last_token_time_ns: by the monotonic clock (0: did not happen yet); written by the engine only.
    block_keys: of its first full blocks, as far as anybody asked for them.
    num_allocated_blocks, num_reused_blocks: KV cache blocks it was ever given, and those of them that came with the
        keys and values of its tokens. num_cached_tokens: its tokens that had them when it first started. These three
        and the two above are written by the block allocator only.
    history: of its tokens, once a penalty or a bad word asks for it; made and extended by logits.py only.
    bias: `embedding_bias` on the device, token ids int64 [n] and biases float32 [n].
    has_host_work: whether its tokens are charged by `HostWork`.
    host_debt_s: what its tokens took of the engine's thread beyond its share; written by `HostWork` only.
    held_log_probs, held_logits: of the tokens that have not left yet. cum_log_prob: the sum over those that have.
    context_logits: of the prompt's first tokens, a row each, until they leave; written by the model runner only.
    prompt_log_probs: of the prompt, until they leave; None before, if the request did not ask for them, and after.
    search: the beam search it belongs to. The sequence of the request is its first beam and stands for all of them:
        only its `status`, times and place in the queues count. siblings: of that first one, the other beams.
    score: of a beam, the sum of its tokens' log-probs.
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
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_charged_tokens: int = 0
    num_overtakes: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    num_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_cached_tokens: int = 0
    history: TokenHistory | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    has_host_work: bool = False
    host_debt_s: float = 0.0
    held_log_probs: list[TokenLogProb] = field(default_factory=list)
    held_logits: list[bytes] = field(default_factory=list)
    context_logits: list[bytes] = field(default_factory=list)
    prompt_log_probs: PromptLogProbs | None = None
    cum_log_prob: float = 0.0
    search: BeamSearch | None = None
    siblings: list[Sequence] = field(default_factory=list)
    score: float = 0.0

    @property
    def beams(self) -> list[Sequence]:
        """What is computed for the request: the sequence itself and, in a beam search, the other beams."""
        return [self, *self.siblings]

    @property
    def width(self) -> int:
        """The largest number of `beams`."""
        return self.request.sampling.beam_width

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
    def is_complete(self) -> bool:
        """Whether nothing is left to compute: its answer is as long as it may become, whatever its pending tokens are.

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

        num_blocks = sum(beam.num_allocated_blocks for beam in self.beams)
        num_reused_blocks = sum(beam.num_reused_blocks for beam in self.beams)
        return PerfMetrics(
            arrival_time_ns=since_epoch(self.arrival_time_ns),
            first_scheduled_time_ns=since_epoch(self.first_scheduled_time_ns),
            first_token_time_ns=since_epoch(self.first_token_time_ns),
            last_token_time_ns=since_epoch(self.last_token_time_ns),
            kv_cache_alloc_total_blocks=num_blocks,
            kv_cache_alloc_new_blocks=num_blocks - num_reused_blocks,
            kv_cache_reused_blocks=num_reused_blocks,
        )

    def release_log_probs(self, num_tokens: int) -> list[TokenLogProb]:
        """Those of the next `num_tokens` tokens that leave; none when the request did not ask for them."""
        if not self.held_log_probs:
            return []
        released, self.held_log_probs = self.held_log_probs[:num_tokens], self.held_log_probs[num_tokens:]
        self.cum_log_prob += sum(token.log_prob for token in released)
        return released

    def release_logits(self, num_tokens: int) -> tuple[bytes, bytes]:
        """Those of the prompt, if they have not left yet, and those of the next `num_tokens` tokens that leave."""
        if not self.held_logits and not self.context_logits:
            return b"", b""
        context, self.context_logits = self.context_logits, []
        released, self.held_logits = self.held_logits[:num_tokens], self.held_logits[num_tokens:]
        return b"".join(context), b"".join(released)

    def release_prompt_log_probs(self) -> bytes:
        """Those of the whole prompt, once, as soon as they are known; none when the request did not ask for them."""
        if self.prompt_log_probs is None or not self.prompt_log_probs.is_complete:
            return b""
        released, self.prompt_log_probs = self.prompt_log_probs.to_bytes(), None
        return released
