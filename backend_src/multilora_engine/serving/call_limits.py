"""How much one request may ask for. Its sequences go together to the engine, whose loop all requests share."""

from __future__ import annotations

from collections.abc import Callable

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.request import SamplingParams
from multilora_engine.serving.request_parser import GenerateCall
from multilora_engine.serving.token_lists import word_bytes

_LOGIT_BYTES = 4
"""Logits are float32."""


def check_call(call: GenerateCall, info: EngineInfo, can_stream: bool = False) -> None:
    """Raises InvalidRequest, with the numbers, for a request that asks for more than the engine's limits.

    can_stream: whether the request is to a model that streams.
    """
    limits, width = info.limits, call.sampling[0].beam_width
    num_sequences = len(call.prompts) * (width if call.is_search else call.num_sequences)
    _check("sequences", num_sequences, limits.max_sequences_per_request)
    num_prompt_tokens = sum(map(len, call.prompts)) * call.requests_per_row
    _check("prompt tokens", num_prompt_tokens, limits.max_prompt_tokens_per_request)
    _check("prompt log-probs", _num_prompt_log_probs(call), limits.max_prompt_log_probs_per_request)
    _check("stop words and bad words", _total(call, _num_words), limits.max_words_per_request)
    _check("bytes of stop words and bad words", _total(call, _num_word_bytes), limits.max_word_bytes_per_request)
    _check("biases", _total(call, lambda sampling: len(sampling.embedding_bias)), limits.max_biases_per_request)
    num_guides = len({sampling.guide for sampling in call.sampling} - {None})
    _check("different guides", num_guides, limits.max_guides_per_request)
    most_logits = (
        min(limits.max_logits_bytes, limits.max_streamed_logits_bytes) if can_stream else limits.max_logits_bytes
    )
    _check("bytes of logits", logits_bytes(call, info), most_logits)


def logits_bytes(call: GenerateCall, info: EngineInfo) -> int:
    """The largest size, in bytes, of the logits that a request asks for."""
    num_rows = 0
    for prompt, sampling in zip(call.prompts, call.sampling, strict=True):
        num_answered = max(0, min(sampling.max_tokens, info.max_model_len - len(prompt)))
        num_rows += sampling.return_context_logits * len(prompt) + sampling.return_generation_logits * num_answered
    return num_rows * call.requests_per_row * info.vocab_size * _LOGIT_BYTES


def _num_prompt_log_probs(call: GenerateCall) -> int:
    rows = zip(call.prompts, call.sampling, strict=True)
    wanted = [(prompt, sampling) for prompt, sampling in rows if sampling.return_prompt_log_probs]
    return call.requests_per_row * sum(len(prompt) * (1 + s.num_prompt_top_log_probs) for prompt, s in wanted)


def _total(call: GenerateCall, count: Callable[[SamplingParams], int]) -> int:
    """The total over all sequences; the beams of a search count once."""
    return sum(map(count, call.sampling)) * call.requests_per_row


def _num_words(sampling: SamplingParams) -> int:
    return len(sampling.stop_words) + len(sampling.stop_token_sequences) + len(sampling.bad_token_sequences)


def _num_word_bytes(sampling: SamplingParams) -> int:
    return word_bytes(sampling.stop_words, sampling.stop_token_sequences + sampling.bad_token_sequences)


def _check(noun: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequest(f"the request has {number} {noun} in all; a request may have {most}: send it in parts")
