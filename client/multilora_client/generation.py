"""`Generation` and `Chunk`: a whole answer, and a piece of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, including special tokens, and how likely each was after the tokens before it.

    tokens: for each token its bytes, then the bytes of the likeliest tokens in its place. A special token is spelled by
        its name.
    log_probs: the log-prob of each token; 0.0 for the first one, which has nothing before it.
    top_log_probs: for each token the likeliest tokens in its place, best first, as (token id, log-prob); none for the
        first token.
    """

    token_ids: list[int]
    tokens: list[list[bytes]]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Alternative:
    """One of the answers that a request asked for at once.

    log_probs: the log-prob of each token, when asked for.
    top_log_probs: for each token the likeliest tokens in its place, best first, as (token id, log-prob).
    tokens: for each token its UTF-8 bytes, maybe part of a character, then the bytes of the likeliest tokens.
    cum_log_prob: the sum over the tokens; None when not asked for.
    generation_logits: the logits from which each token was chosen, float32 [tokens, vocab]; None when not asked for.
    num_output_tokens: also known from models that return only text.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    cum_log_prob: float | None = None
    generation_logits: NDArray[np.float32] | None = field(default=None, compare=False)
    num_output_tokens: int | None = None
    tokens: list[list[bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """The fields of a whole answer and of a piece of an answer.

    text: the completion without the prompt. token_ids: its tokens; empty from models that return only text.
    finish_reason: `stop` (end token or stop word), `length` (max_tokens or the context used up) or `cancelled`; None
        before the end, and from models that do not say.
    num_input_tokens, num_output_tokens: totals so far; None from models that do not say.
    num_cached_tokens: how many of the prompt's tokens the server did not compute, because its prefix cache had them.
    thinking_is_open: whether the prompt ends where the model's thinking begins, after `<think>`.
    lora_task_id, lora_digest: the adapter that answered, as the server reports it; None and "" for the base model.
    lora_name: its name; "" where it has none, and from models that do not say.
    log_probs, top_log_probs, tokens, cum_log_prob, generation_logits: as in Alternative.
    context_logits: the logits after each token of the prompt, float32 [tokens, vocab].
    prompt: the prompt's tokens and their log-probs. context_logits and prompt are None when not asked for; in a stream
        only the first chunk of a sequence has them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    lora_task_id: int | None
    lora_digest: str
    request_id: str
    lora_name: str = field(default="", kw_only=True)
    log_probs: list[float] = field(default_factory=list, kw_only=True)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list, kw_only=True)
    tokens: list[list[bytes]] = field(default_factory=list, kw_only=True)
    cum_log_prob: float | None = field(default=None, kw_only=True)
    generation_logits: NDArray[np.float32] | None = field(default=None, compare=False, kw_only=True)
    context_logits: NDArray[np.float32] | None = field(default=None, compare=False, kw_only=True)
    prompt: PromptTokens | None = field(default=None, kw_only=True)
    num_cached_tokens: int | None = field(default=None, kw_only=True)
    thinking_is_open: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Generation(Answer):
    """A whole answer. alternatives: all answers, beginning with this one; the beams of a search come best first."""

    alternatives: list[Alternative] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True)
class Chunk(Answer):
    """A piece of an answer; the texts of all chunks with its `sequence_index` together are the whole one.

    is_final: whether it is the last chunk of the stream, in which every answer has ended.
    """

    is_final: bool
    sequence_index: int = 0
