"""What crosses the engine's door: a request in (`GenerationRequest`), tokens out (`TokenOutput`).

`GenerationRequest` and `TokenOutput` are frozen values made of plain Python types (msgspec carries them between
processes as they are). `Sequence` is the engine's own mutable state of one request and never leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from multilora_engine.lora.host_tier import CachedAdapter
    from multilora_engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Greedy when `temperature` is 0 or `top_k` is 1. `top_k` 0 and `top_p` 1 mean no restriction. `seed` None draws one.
    No end token before `min_tokens` tokens. `end_id` None means the checkpoint's own end tokens; -1 means none.
    `stop_words` are matched on the generated text and never emitted, not even in part.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 1.0
    seed: int | None = None
    end_id: int | None = None
    stop_words: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, as the engine accepts it.

    request_id: unique inside the engine (the fronts make it; a client's own id need not be unique).
    lora_task_id: the adapter to use, None for the base model. It must be cached (`LoRAManager.put`) by then.
    timeout_s: seconds from acceptance after which the engine ends the request, None for `request_timeout_s`.
    priority: smaller is served first, equal ones in order of arrival.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    lora_task_id: int | None = None
    timeout_s: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step gave one request. Concatenating `token_ids` and `text` over a request gives the whole answer.

    token_ids: the tokens whose text is complete in this output; tokens that end inside a UTF-8 character, or that
        could still become a stop word, are held back until they are decided.
    text: their text; what a stop word cuts off is not in it.
    finish_reason: set exactly once, on the last output of the request: `stop` (end token or stop word), `length`
        (max_tokens or the context is used up), `cancelled` (it was aborted). None before.
    error_code, error_message: set instead of a finish reason when the request failed (codes of errors.py).
    num_prompt_tokens, num_output_tokens: totals so far.
    lora_digest: digest of the adapter that answered, empty for the base model.
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
    num_computed_tokens: tokens whose keys and values are in the cache; written by the scheduler only.
    num_overtakes: sequences with an adapter that were admitted before this one although they came later.
    """

    request: GenerationRequest
    arrival: int
    adapter: CachedAdapter | None
    text: TextStream
    random: Random
    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_overtakes: int = 0
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens start .. end - 1 of prompt and answer."""
        prompt = self.request.prompt_token_ids
        if start >= len(prompt):
            return self.output_token_ids[start - len(prompt) : end - len(prompt)]
        return (prompt[start:end] + self.output_token_ids)[: end - start]
