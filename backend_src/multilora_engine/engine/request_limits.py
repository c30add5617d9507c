"""`RequestLimits`: the most that an engine can do for one request, even when it is idle."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np

from multilora_engine.engine_info import SourceFacts
from multilora_engine.errors import InvalidRequest
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sequences.beam_search import check_beam_sampling

_LOGIT_BYTES = 4
"""Logits leave as float32."""

_MAX_TOP_LOG_PROBS = 100
"""Log-probs of one answer's token, each with its text; a client that wants all of them asks for the logits."""

_MAX_PROMPT_TOP_LOG_PROBS = 20
"""The same for a token of the prompt: a prompt has far more tokens, and tells them all at once."""


_LARGEST_FLOAT, _SMALLEST_FLOAT = (2 - 2**-23) * 2.0**127, 2.0**-149
"""Positive ones of float32, in which these numbers arrive and are used."""

_LARGEST_INT = 2**31 - 1

_RANGES: dict[str, tuple[str, float, float]] = {
    "min_tokens": ("min_tokens", 0, _LARGEST_INT),
    "temperature": ("temperature", 0, _LARGEST_FLOAT),
    "top_k": ("runtime_top_k", 0, _LARGEST_INT),
    "top_p": ("runtime_top_p", _SMALLEST_FLOAT, 1),
    "top_p_decay": ("runtime_top_p_decay", _SMALLEST_FLOAT, 1),
    "top_p_min": ("runtime_top_p_min", _SMALLEST_FLOAT, 1),
    "top_p_reset_id": ("runtime_top_p_reset_ids", -1, _LARGEST_INT),
    "min_p": ("min_p", 0, 1),
    "repetition_penalty": ("repetition_penalty", _SMALLEST_FLOAT, _LARGEST_FLOAT),
    "presence_penalty": ("presence_penalty", -_LARGEST_FLOAT, _LARGEST_FLOAT),
    "frequency_penalty": ("frequency_penalty", -_LARGEST_FLOAT, _LARGEST_FLOAT),
    "length_penalty": ("len_penalty", -_LARGEST_FLOAT, _LARGEST_FLOAT),
    "beam_search_diversity_rate": ("beam_search_diversity_rate", -_LARGEST_FLOAT, _LARGEST_FLOAT),
}
"""Fields of `SamplingParams`: the name that clients know, the least and the largest value. Within them no arithmetic
of a step overflows."""


@dataclass(frozen=True)
class RequestLimits:
    """max_model_len: tokens of a prompt and its answer. num_blocks, of block_size tokens each: the whole KV cache.

    source: as of `EngineInfo`. max_num_encoder_tokens: of the sources of one step.
    """

    max_model_len: int
    vocab_size: int
    max_logits_bytes: int
    max_beam_width: int
    num_blocks: int
    block_size: int
    source: SourceFacts | None = None
    max_num_encoder_tokens: int = 0

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for a request that this engine can never serve."""
        prompt, sampling, vocab_size = request.prompt_token_ids, request.sampling, self.vocab_size
        self._check_source(request)
        name, field = ("prompt", "input_ids") if self.source is None else ("decoder's text", "decoder_input_ids")
        if not prompt:
            raise InvalidRequest(f"the {name} is empty: it has no tokens")
        if len(prompt) + min(1, sampling.max_tokens) > self.max_model_len:
            is_cache = self.max_model_len == self.num_blocks * self.block_size
            limit = f"{self.max_model_len}{', all that kv_cache_memory_bytes has room for' if is_cache else ''}"
            raise InvalidRequest(f"the {name} has {len(prompt)} tokens and max_model_len is {limit}: no room to answer")
        _check_text(field, prompt, vocab_size)
        if request.lora_start is not None:
            _check_lora_start(request.lora_start, request)
        if request.lora_expected_digest and request.lora_task_id is None:
            raise InvalidRequest("lora_expected_digest without an adapter; send lora_task_id or lora_name, too")
        if sampling.max_tokens < 0:
            raise InvalidRequest(f"max_tokens is {sampling.max_tokens}, expected at least 0")
        if sampling.end_id is not None and not -1 <= sampling.end_id < vocab_size:
            raise InvalidRequest(f"end_id is {sampling.end_id}, expected -1 (none) .. {vocab_size - 1}")
        for place, forced in (("first", sampling.forced_first_id), ("last", sampling.forced_last_id)):
            if forced is not None and not 0 <= forced < vocab_size:
                raise InvalidRequest(f"the forced {place} token is {forced}, expected 0 .. {vocab_size - 1}")
        _check_numbers(request)
        _check_token_ids(sampling, vocab_size)
        _check_counts(sampling, vocab_size)
        self._check_logits_size(request)
        if sampling.beam_width != 1:
            self._check_beams(request)
        self._check_blocks(request)

    def _check_source(self, request: GenerationRequest) -> None:
        source = request.source_token_ids
        if self.source is None:
            if source:
                raise InvalidRequest(
                    f"the request has a source of {len(source)} tokens for an encoder, and the model has none"
                )
            return
        if not source:
            raise InvalidRequest("the source is empty: the encoder needs at least one token")
        if self.source.max_tokens is not None and len(source) > self.source.max_tokens:
            is_budget = self.source.max_tokens == self.max_num_encoder_tokens
            limit = "max_num_encoder_tokens is" if is_budget else "the encoder's positions are"
            raise InvalidRequest(f"the source has {len(source)} tokens and {limit} {self.source.max_tokens}")
        _check_text("input_ids", source, self.vocab_size)
        if request.lora_start is not None:
            raise InvalidRequest(
                f"lora_start is {request.lora_start}, and an adapter of an encoder-decoder model computes all tokens"
            )

    def _check_logits_size(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        num_rows = sampling.return_context_logits * len(
            request.prompt_token_ids
        ) + sampling.return_generation_logits * self.max_output_tokens(request)
        num_bytes = num_rows * self.vocab_size * _LOGIT_BYTES
        if num_bytes > self.max_logits_bytes:
            raise InvalidRequest(
                f"the logits of {num_rows} tokens are {num_bytes} bytes; a request may have "
                f"{self.max_logits_bytes}: ask for fewer tokens, or for top log-probs instead"
            )

    def _check_beams(self, request: GenerationRequest) -> None:
        width = request.sampling.beam_width
        if not 1 <= width <= self.max_beam_width:
            raise InvalidRequest(
                f"beam_width is {width}; a request may have 1 .. {self.max_beam_width} beams, and no more than "
                "max_num_seqs"
            )
        check_beam_sampling(request.sampling)

    def _check_blocks(self, request: GenerationRequest) -> None:
        """A sequence alone always has room, since max_model_len has."""
        width, num_source_tokens = request.sampling.beam_width, len(request.source_token_ids)
        if width == 1 and not num_source_tokens:
            return
        num_tokens = len(request.prompt_token_ids) + self.max_output_tokens(request)
        num_blocks = width * -(-num_tokens // self.block_size) - (-num_source_tokens // self.block_size)
        if num_blocks > self.num_blocks:
            source = f"a source of {num_source_tokens} tokens and " if num_source_tokens else ""
            raise InvalidRequest(
                f"{source}{width} beams of up to {num_tokens} tokens may need {num_blocks} blocks of the KV cache, "
                f"which has {self.num_blocks}; ask for fewer beams or max_tokens"
            )

    def max_output_tokens(self, request: GenerationRequest) -> int:
        """The number of tokens that the request asks for, or that there is room for after its prompt."""
        return min(request.sampling.max_tokens, self.max_model_len - len(request.prompt_token_ids))


def _check_text(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest for a token that is not in the vocabulary. field: as clients know it."""
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{field} holds {token_ids[position]} at position {position}, expected 0 .. {vocab_size - 1}"
        )


def _check_lora_start(start: int, request: GenerationRequest) -> None:
    """Raises InvalidRequest for a start that is not in the prompt, or without an adapter that could start there."""
    num_tokens = len(request.prompt_token_ids)
    if not 0 <= start < num_tokens:
        raise InvalidRequest(
            f"lora_start is {start} and the prompt has {num_tokens} tokens, expected 0 .. {num_tokens - 1}"
        )
    if request.lora_task_id is None:
        raise InvalidRequest(f"lora_start is {start} and the request names no adapter; send lora_task_id or lora_name")


def _check_numbers(request: GenerationRequest) -> None:
    """Raises InvalidRequest for a number that is out of its range, or none."""
    for field, (name, low, high) in _RANGES.items():
        # Written so that NaN fails it.
        if not low <= (value := getattr(request.sampling, field)) <= high:
            raise InvalidRequest(f"{name} is {value!s:.40}, expected a number in [{low:g}, {high:g}]")
    biases = np.array([bias for _, bias in request.sampling.embedding_bias])
    if len(biases) and not np.abs(biases).max() <= _LARGEST_FLOAT:
        place = int(np.flatnonzero(~(np.abs(biases) <= _LARGEST_FLOAT))[0])
        token_id, bias = request.sampling.embedding_bias[place]
        raise InvalidRequest(
            f"the embedding_bias of token {token_id} is {bias}, expected a number in "
            f"[{-_LARGEST_FLOAT:g}, {_LARGEST_FLOAT:g}]"
        )
    if request.timeout_s is not None and math.isnan(request.timeout_s):
        raise InvalidRequest("the timeout is nan, expected seconds")


def _check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest for a token id that is not in the vocabulary."""
    biased = tuple(map(itemgetter(0), sampling.embedding_bias))
    token_ids = {
        "end_ids": sampling.end_ids,
        "embedding_bias": biased,
        "stop_words_list": tuple(chain.from_iterable(sampling.stop_token_sequences)),
        "bad_words_list": tuple(chain.from_iterable(sampling.bad_token_sequences)),
    }
    for name, ids in token_ids.items():
        # The extremes are found ten times as fast as the first id that is wrong, and nearly always suffice.
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(f"{name} has the token {wrong}, expected 0 .. {vocab_size - 1}")
    if not all(sampling.bad_token_sequences):
        raise InvalidRequest(f"bad_words_list: word {sampling.bad_token_sequences.index(())} has no tokens")
    if len(set(biased)) < len(biased):
        token_id, count = Counter(biased).most_common(1)[0]
        raise InvalidRequest(f"embedding_bias has {count} biases of token {token_id}; send one")


def _check_counts(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest when more of the likeliest tokens are wanted than are told."""
    counts = {
        "num_top_log_probs": (sampling.num_top_log_probs, _MAX_TOP_LOG_PROBS),
        "num_prompt_top_log_probs": (sampling.num_prompt_top_log_probs, _MAX_PROMPT_TOP_LOG_PROBS),
    }
    for name, (count, limit) in counts.items():
        most = min(vocab_size, limit)
        if not 0 <= count <= most:
            raise InvalidRequest(f"{name} is {count}, expected 0 .. {most}")
