"""Changes the model's logits as requests ask before a token is chosen: biases, penalties, forbidden tokens.

Every function takes the logits of a mixed batch, [len(sequences), vocab] float32, changes them in place, touches only
the rows and tokens concerned, and does nothing on the device for a batch that asks for nothing. All they know of a
sequence's tokens is its `TokenHistory`, which outlives a preemption and grows with each token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multilora_engine.engine.sequence import Sequence
from multilora_engine.execution.transfer import to_device
from multilora_engine.request import SamplingParams
from multilora_engine.sampling.token_history import TokenHistory, TokenIds

_LIMIT = 1e30
"""Adjusted logits stay within +-_LIMIT: an overflow to infinity would be NaN as soon as two of them are subtracted."""

_NO_TOKENS = np.array([], np.int64)

_Entry = tuple[int, NDArray[Any], NDArray[Any] | float]
"""A row, some of its tokens, each once, and a value for each or for all of them."""


def adjust_logits(logits: torch.Tensor, sequences: list[Sequence], end_token_ids: tuple[int, ...]) -> list[int]:
    """Bias, penalties and bans, in the order of transformers' `generate`. The rows in which tokens are forbidden.

    Bans come last: before them, penalties could make a forbidden token possible again.
    """
    _add_bias(logits, sequences)
    _penalise_repetition(logits, sequences)
    _penalise_frequency(logits, sequences)
    return sorted({*_forbid(logits, sequences, end_token_ids), *_apply_guides(logits, sequences)})


def end_tokens(sampling: SamplingParams, end_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end an answer: the checkpoint's (`end_token_ids`), the request's own, or none for end_id -1."""
    if sampling.end_id is None:
        return end_token_ids
    return () if sampling.end_id < 0 else (sampling.end_id,)


def bias_tensors(sampling: SamplingParams, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`embedding_bias` as tensors, made once a request: token ids int64 [n] and biases float32 [n]. None without."""
    if not sampling.embedding_bias:
        return None
    token_ids, biases = zip(*sampling.embedding_bias, strict=True)
    # By NumPy, which reads tens of thousands of numbers in half the time.
    ids, values = np.fromiter(token_ids, np.int64), np.fromiter(biases, np.float32)
    return to_device(torch.from_numpy(ids), device), to_device(torch.from_numpy(values), device)


def _add_bias(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        if sequence.bias is not None:
            token_ids, biases = sequence.bias
            logits[row, token_ids] = (logits[row, token_ids] + biases).clamp(-_LIMIT, _LIMIT)


def _penalise_repetition(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Divide positive and multiply negative logits of tokens in prompt and answer (CTRL, arXiv:1909.05858)."""
    entries: list[_Entry] = [
        (row, _history(sequence).seen.token_ids, penalty)
        for row, sequence in enumerate(sequences)
        if (penalty := sequence.request.sampling.repetition_penalty) != 1.0
    ]
    if entries:
        index, penalties = _split(entries, logits.device)
        scores = logits[index]
        logits[index] = torch.where(scores < 0, scores * penalties, scores / penalties).clamp(-_LIMIT, _LIMIT)


def _penalise_frequency(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Subtract from the tokens of the answer: frequency_penalty times their count, and presence_penalty (OpenAI)."""
    entries: list[_Entry] = []
    for row, sequence in enumerate(sequences):
        p = sequence.request.sampling
        if (p.frequency_penalty or p.presence_penalty) and sequence.output_token_ids:
            answered = _history(sequence).answered
            entries.append((row, answered.token_ids, p.frequency_penalty * answered.counts + p.presence_penalty))
    if entries:
        index, penalties = _split(entries, logits.device)
        logits[index] = (logits[index] - penalties).clamp(-_LIMIT, _LIMIT)


def _forbid(logits: torch.Tensor, sequences: list[Sequence], end_token_ids: tuple[int, ...]) -> list[int]:
    entries: list[_Entry] = [
        (row, token_ids, -np.inf)
        for row, sequence in enumerate(sequences)
        if len(token_ids := _forbidden(sequence, end_token_ids))
    ]
    if entries:
        index, _ = _split(entries, logits.device)
        logits[index] = -torch.inf
    return [row for row, _, _ in entries]


def _forbidden(sequence: Sequence, end_token_ids: tuple[int, ...]) -> TokenIds:
    sampling = sequence.request.sampling
    has_bad_words, may_not_end = (
        bool(sampling.bad_token_sequences),
        len(sequence.output_token_ids) < sampling.min_tokens,
    )
    if not has_bad_words and not may_not_end:
        return _NO_TOKENS
    bad = _history(sequence).forbidden() if has_bad_words else _NO_TOKENS
    ends = end_tokens(sampling, end_token_ids) if may_not_end else ()
    return np.concatenate([bad, np.array(ends, np.int64)])


def _apply_guides(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    guides = [(row, sequence.guide.allowed) for row, sequence in enumerate(sequences) if sequence.guide is not None]
    if not guides:
        return []
    rows, masks = zip(*guides, strict=True)
    words = to_device(torch.from_numpy(np.stack(masks)), logits.device).unsqueeze(-1)
    bits = (words >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    index = to_device(torch.tensor(rows), logits.device)
    logits[index] = logits[index].masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
    return list(rows)


def _history(sequence: Sequence) -> TokenHistory:
    """The sequence's history, with all of its tokens in it."""
    if sequence.history is None:
        sequence.history = TokenHistory(sequence.request)
    history = sequence.history
    history.extend(sequence.token_ids(history.num_tokens, sequence.num_tokens))
    return history


def _split(entries: list[_Entry], device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows and token ids, which together index the logits, and the values, float32."""
    counts = [len(token_ids) for _, token_ids, _ in entries]
    rows = np.repeat([row for row, _, _ in entries], counts)
    index = np.stack([rows, np.concatenate([token_ids for _, token_ids, _ in entries])])
    values = np.concatenate(
        [np.broadcast_to(value, count) for (_, _, value), count in zip(entries, counts, strict=True)]
    )
    rows_and_ids = to_device(torch.from_numpy(index), device)
    return (rows_and_ids[0], rows_and_ids[1]), to_device(torch.from_numpy(values).float(), device)
