"""What crosses the engine's door: a request in (`GenerationRequest`), tokens out (`TokenOutput`).

`GenerationRequest` and `TokenOutput` are frozen values made of plain Python types: structs, which msgspec carries
between processes as they are, and which are made in a tenth of the time that frozen dataclasses take. `Sequence` is the
engine's own mutable state of one request and never leaves it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec

from multilora_engine.lora.names import TaskId, scoped_task_id

if TYPE_CHECKING:
    import torch

    from multilora_engine.beam_search import BeamSearch
    from multilora_engine.guided import GuideMatcher
    from multilora_engine.lora.host_tier import CachedAdapter
    from multilora_engine.prompt_log_probs import PromptLogProbs
    from multilora_engine.text import TextStream
    from multilora_engine.token_history import TokenHistory

FinishReason = Literal["stop", "length", "cancelled"]


GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar"]


class Guide(msgspec.Struct, frozen=True):
    """What the answer must parse as: a JSON object or array, a JSON schema, a regular expression, or a grammar.

    text: the schema, expression (Rust's syntax) or grammar (GBNF with a `root`, or Lark with a `start`); unused for
    `json`.
    """

    type: GuideType
    text: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is chosen, and when to stop.

    Greedy when `temperature` is 0 or `top_k` is 1. `top_k` 0, `top_p` 1 and `min_p` 0 mean no restriction. `seed` None
    draws one. `top_p_decay`, `top_p_min`, `top_p_reset_id`: after each token top_p is multiplied by the decay, down to
    the minimum, and set back when the token with the reset id was chosen (factual-nucleus sampling).

    repetition_penalty (1 is none) counts prompt and answer; presence_penalty and frequency_penalty (0 is none) count
    the answer. embedding_bias: (token id, what is added to its logit). bad_token_sequences: never completed.

    No end token before `min_tokens` tokens. `end_id` None means the checkpoint's own end tokens; -1 means none. With a
    `guide` an end token is chosen only where the answer parses; where nothing can follow, the answer ends by itself,
    before `min_tokens` if need be.
    `stop_words` are matched on the generated text and never emitted, not even in part. stop_token_sequences: the same
    by token ids, as upstream's `stop_words_list` has them. include_stop_str_in_output: emit what stopped it after all.
    max_tokens 0 computes the prompt and answers with no token.

    return_log_probs: log-probabilities of the chosen tokens, by the model's own logits. num_top_log_probs: of so many
    most probable tokens beside it. return_context_logits, return_generation_logits: these logits themselves, behind
    each token of the prompt, and those that each token of the answer was chosen by. return_prompt_log_probs:
    log-probabilities of the prompt's tokens. num_prompt_top_log_probs: with these, of so many most probable tokens in
    their places.

    beam_width > 1: not a drawn answer but the so many likeliest ones that beam search finds (beam_search.py), ranked by
    the log-probs of their tokens, after temperature, biases and penalties, added up and divided by length
    ** length_penalty. early_stopping 1: done with `beam_width` ended answers. 0: done when the best beam, as long as it
    is now, would be no better than the worst of these. Any other: the same, at the length that is best for the beam.
    beam_search_diversity_rate: added to a candidate's rank for each beam that is likelier than its own.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 1.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    embedding_bias: tuple[tuple[int, float], ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    end_id: int | None = None
    stop_words: tuple[str, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    guide: Guide | None = None
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_prompt_log_probs: bool = False
    num_prompt_top_log_probs: int = 0
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: int = 1
    beam_search_diversity_rate: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether something is told of every token of the prompt, so that each must be computed."""
        return self.return_context_logits or self.return_prompt_log_probs

    @property
    def must_read_each_token(self) -> bool:
        """Whether the host must have read a token before the next one is chosen, or reads more of it than its id."""
        decays = self.top_p_decay != 1.0 or self.top_p_min > self.top_p
        penalises = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        forbids = self.min_tokens > 0 or bool(self.bad_token_sequences) or self.guide is not None
        tells = self.return_log_probs or self.return_context_logits or self.return_generation_logits
        return decays or penalises or forbids or tells or self.beam_width > 1


class Sender(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who sent a request, as far as the server can tell.

    tenant: whose API key it came with; empty without keys, and for those who run the server.
    name: whom its work is charged to and who may end it: the tenant, else the client that a proxy names, else empty.
    key_id: of the API key. requests_per_minute, tokens_per_minute: what this key may cause; None is no limit.
    weight: its share of the server when others wait, too, compared to theirs.
    """

    tenant: str = ""
    name: str = ""
    key_id: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0

    @property
    def is_known(self) -> bool:
        """Whether it can be told from others."""
        return bool(self.name or self.key_id)


class GenerationRequest(msgspec.Struct, frozen=True):
    """One prompt, as the engine accepts it.

    request_id: unique inside the engine (the fronts make it; a client's own id need not be unique).
    lora_task_id: the adapter to use, None for the base model. It must be cached, or a source must have it.
    timeout_s: seconds from acceptance after which the engine ends the request, None for `request_timeout_s`.
    priority: smaller is served first, equal ones in order of arrival.
    lora_name: what the client calls the adapter of `lora_task_id`, empty if only by that.
    adapter_tenant: the tenant that this adapter belongs to, empty for none.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    lora_task_id: int | None = None
    timeout_s: float | None = None
    priority: int = 0
    lora_name: str = ""
    adapter_tenant: str = ""
    sender: Sender = Sender()

    @property
    def task_id(self) -> TaskId | None:
        """The adapter to use, as the engine knows it."""
        return None if self.lora_task_id is None else scoped_task_id(self.adapter_tenant, self.lora_task_id)


class TokenLogProb(msgspec.Struct, frozen=True):
    """Log-probability of a chosen token, and of the most probable ones, best first: (token id, log-probability)."""

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class PerfMetrics(msgspec.Struct, frozen=True):
    """Times of one request in nanoseconds since the epoch (0: did not happen), and the KV cache blocks it was given.

    The times are by the clock as it was set at the request's end, so that what is between them was measured.
    Reused blocks came with keys and values of its tokens, new ones without; total is both. Blocks that it lost by
    preemption and was given again count each time.
    """

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_cache_alloc_total_blocks: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_reused_blocks: int = 0


class BeamOutput(msgspec.Struct, frozen=True):
    """One of the answers of a beam search.

    log_probs: of each token. They and their sum are what the search ranked by.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    log_probs: list[TokenLogProb]
    cum_log_prob: float


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step gave one request. Concatenating `token_ids` and `text` over a request gives the whole answer.

    token_ids: the tokens whose text is complete in this output; tokens that end inside a UTF-8 character, or that
        could still become a stop word, are held back until they are decided.
    text: their text; what a stop word cuts off is not in it.
    finish_reason: set exactly once, on the last output of the request: `stop` (end token or stop word), `length`
        (max_tokens or the context is used up), `cancelled` (it was aborted). None before.
    error_code, error_message: set instead of a finish reason when the request failed (codes of errors.py).
    num_prompt_tokens, num_output_tokens: totals so far. num_cached_tokens: of the prompt's tokens, how many had their
        keys and values in the prefix cache when the request first started.
    lora_digest: digest of the adapter that answered, empty for the base model.
    log_probs: one per entry of `token_ids` when the request asked for them. cum_log_prob: their sum so far.
    generation_logits: likewise, float32 [tokens, vocab]. context_logits: of the whole prompt, in the first output.
    prompt_log_probs: of every token of the prompt, in the first output; rows of `prompt_log_probs.row_type`.
    perf: in the last output.
    beams: all that beam search gives, in the one output there is: best first, at most `beam_width`. Its reason is the
        best answer's, and num_output_tokens counts all of them.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    error_message: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    lora_digest: str = ""
    log_probs: list[TokenLogProb] = []
    cum_log_prob: float = 0.0
    generation_logits: bytes = b""
    context_logits: bytes = b""
    prompt_log_probs: bytes = b""
    num_cached_tokens: int = 0
    perf: PerfMetrics | None = None
    beams: list[BeamOutput] = []

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error_code is not None


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
