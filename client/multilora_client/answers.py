"""Reads the responses to a generation: the outputs of the models as answers and pieces of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilora_client.errors import Unavailable
from multilora_client.generation import Alternative, Chunk, Generation, PromptTokens
from multilora_client.messages import Response


def parse_generation(response: Response, request_id: str) -> Generation:
    answers = _alternatives(response)
    return Generation(**_answer_fields(response, answers[0]), request_id=request_id, alternatives=answers)


class ChunkReader:
    """Makes chunks of the responses of one stream. A response has a piece of one answer.

    `read` counts the answers that have not ended: only gRPC marks the last response of a stream.
    """

    def __init__(self, request_id: str, num_sequences: int) -> None:
        self._request_id = request_id
        self._num_open = num_sequences
        self._has_ended = False

    def read(self, response: Response) -> Chunk:
        answer = _alternatives(response)[0]
        self._num_open -= answer.finish_reason is not None
        self._has_ended = response.is_final or self._num_open == 0
        return Chunk(
            **_answer_fields(response, answer),
            request_id=self._request_id,
            is_final=self._has_ended,
            sequence_index=response.first("sequence_index") or 0,
        )

    def check_ended(self) -> None:
        """Raises Unavailable if the stream has ended before its answers.

        Triton's HTTP front (24.10) hands responses to its threads through sockets, and does not look whether a socket
        took one: when some 280 wait for a thread, it drops the last ones of a stream, and says nothing.
        """
        if not self._has_ended:
            raise Unavailable("the stream ended before its final response", request_id=self._request_id)


def _alternatives(response: Response) -> list[Alternative]:
    count = max(len(response.outputs.get("text_output", ())), len(response.outputs.get("sequence_length", ())), 1)
    parts = {name: response.split(name, count) for name in _PER_ANSWER}
    return [_alternative({name: parts[name][i] for name in _PER_ANSWER}) for i in range(count)]


_PER_ANSWER = (
    "text_output",
    "output_ids",
    "sequence_length",
    "finish_reason",
    "num_output_tokens_so_far",
    "output_log_probs",
    "cum_log_probs",
    "top_log_prob_ids",
    "top_log_probs",
    "output_tokens",
    "generation_logits",
)


def _alternative(values: Mapping[str, Sequence[Any]]) -> Alternative:
    """The values of one answer. A value that was filled up to the longest answer is cut to its own length."""
    length = next(iter(values["sequence_length"]), None)
    log_probs = [float(value) for value in values["output_log_probs"][:length]]
    cum_log_probs = [float(value) for value in values["cum_log_probs"]]
    num_filled_up = len(values["output_log_probs"]) or len(values["output_ids"])
    return Alternative(
        text="".join(values["text_output"]),
        token_ids=list(values["output_ids"])[:length],
        finish_reason=next(iter(values["finish_reason"]), None) or None,
        log_probs=log_probs,
        top_log_probs=_top_log_probs(values["top_log_prob_ids"], values["top_log_probs"], num_filled_up)[:length],
        cum_log_prob=cum_log_probs[0] if log_probs else None,
        generation_logits=_logits(values["generation_logits"], num_filled_up, length),
        num_output_tokens=next(iter(values["num_output_tokens_so_far"]), None),
        tokens=_tokens(values["output_tokens"], num_filled_up)[:length],
    )


def _top_log_probs(ids: Sequence[int], values: Sequence[float], num_tokens: int) -> list[list[tuple[int, float]]]:
    if not len(ids):
        return []
    pairs = [(token_id, float(value)) for token_id, value in zip(ids, values, strict=True)]
    size = len(pairs) // num_tokens
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _tokens(texts: Sequence[str], num_tokens: int) -> list[list[bytes]]:
    """On the wire each character stands for the byte of its number."""
    if not len(texts):
        return []
    size = len(texts) // num_tokens
    return [[text.encode("latin-1") for text in texts[i : i + size]] for i in range(0, len(texts), size)]


def _logits(values: Sequence[float], num_tokens: int | None, length: int | None) -> NDArray[np.float32] | None:
    """Logits [tokens, vocab] of the first `length` of `num_tokens` tokens; None without values."""
    if not len(values) or not num_tokens:
        return None
    return np.asarray(values, np.float32).reshape(num_tokens, -1)[:length]


def _prompt(response: Response) -> PromptTokens | None:
    """The prompt's tokens, None where the response does not tell. The first token has no likeliest ones."""
    ids, log_probs, top_ids, top_log_probs, texts = (response.outputs.get(name, ()) for name in _PROMPT)
    if not len(log_probs):
        return None
    tops = _top_log_probs(top_ids, top_log_probs, len(ids))
    tokens = _tokens(texts, len(ids))
    return PromptTokens(
        token_ids=list(ids),
        tokens=[tokens[0][:1], *tokens[1:]] if tokens else [],
        log_probs=[float(value) for value in log_probs],
        top_log_probs=[[], *tops[1:]] if tops else [],
    )


_PROMPT = ("prompt_ids", "prompt_log_probs", "prompt_top_log_prob_ids", "prompt_top_log_probs", "prompt_tokens")


def _answer_fields(response: Response, answer: Alternative) -> dict[str, Any]:
    """The fields of an answer; the base model gives a task id of 0 and no digest."""
    lora_task_id, lora_digest = response.first("lora_task_id_out"), response.first("lora_digest") or ""
    num_input_tokens = response.first("num_input_tokens")
    # With an encoder, logits are of the tokens that the decoder begins with, and input tokens those of the source.
    *_, num_rows, _ = response.shapes.get("context_logits") or (num_input_tokens, 0)
    return {
        **vars(answer),
        "context_logits": _logits(response.outputs.get("context_logits", ()), num_rows, None),
        "prompt": _prompt(response),
        "num_input_tokens": num_input_tokens,
        "thinking_is_open": bool(response.first("thinking_is_open")),
        "num_cached_tokens": response.first("num_cached_tokens"),
        "lora_task_id": lora_task_id if lora_task_id or lora_digest else None,
        "lora_digest": lora_digest,
        "lora_name": response.first("lora_name_out") or "",
    }
