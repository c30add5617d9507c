"""Changes the model's logits as requests ask, before a token is chosen: biases, penalties, forbidden tokens.

Every function takes the logits of a mixed batch, [len(sequences), vocab] float32, and changes them in place. It touches
only the rows and tokens concerned. For a batch that asks for nothing it does nothing on the device.

The functions know a sequence's tokens from its `TokenHistory`, which outlives a preemption and grows with each token.
Where only the device may know the last token, they also read `DeviceTokens`. Beams and guides need the host to have
read every token, because a fork of a beam has a history of its own, and a guide is a grammar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multilora_engine.batch.transfer import arrays_to_device, to_device
from multilora_engine.request import SamplingParams
from multilora_engine.sampling.token_counts import DeviceTokens
from multilora_engine.sequences.sequence import Sequence, for_each_alone
from multilora_engine.sequences.token_history import ANY_TOKEN, Bans, TokenHistory, TokenIds
from multilora_kernels import LARGEST_LOGIT, forbid_tokens, penalise_tokens

_NO_TOKENS = np.array([], np.int64)

_Row = tuple[int, Sequence]
"""A row of the logits, and its sequence."""

_Values = tuple[NDArray[Any], NDArray[Any] | float]
"""Some tokens of a sequence, each once, and one value for each token or for all of them."""

_Entry = tuple[int, _Values]
"""The row of a sequence, and `_Values` of it."""


def adjust_logits(
    logits: torch.Tensor,
    sequences: list[Sequence],
    end_token_ids: tuple[int, ...],
    tokens: DeviceTokens | None = None,
) -> list[int]:
    """Apply biases, penalties and bans, in the order of transformers' `generate`.

    Bans come last: penalties after them could make a forbidden token possible again. A forced token is under no ban. If
    the work for one sequence fails, its logits stay as they are at that point, and the other sequences go on.

    tokens: None if the host knows all tokens. Returns the rows in which tokens may be forbidden.
    """
    if not are_adjusted(sequences):
        return []
    _add_bias(logits, sequences)
    rows = list(enumerate(sequences))
    of_beams = [(row, sequence) for row, sequence in rows if tokens is None or sequence.search is not None]
    _penalise_repetition(logits, of_beams)
    _penalise_frequency(logits, of_beams)
    restricted = {*_forbid(logits, of_beams, end_token_ids), *_apply_guides(logits, sequences)}
    if tokens is not None:
        others = [(row, sequence) for row, sequence in rows if sequence.search is None]
        restricted |= _adjust_on_device(logits, others, end_token_ids, tokens)
    _force(logits, sequences)
    return sorted(restricted)


def are_adjusted(sequences: list[Sequence]) -> bool:
    """Whether any of the requests may change the logits of its sequence."""
    return any(map(_is_adjusted, sequences))


def end_tokens(sampling: SamplingParams, end_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end an answer: the request's `end_id`, else its adapter's `end_ids`, else the checkpoint's
    (`end_token_ids`); none for -1.
    """
    if sampling.end_id is None:
        return sampling.end_ids or end_token_ids
    return () if sampling.end_id < 0 else (sampling.end_id,)


def bias_tensors(sampling: SamplingParams, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`embedding_bias` as tensors: token ids int64 [n] and biases float32 [n]. They are made once per request.

    None if the request has no `embedding_bias`.
    """
    if not sampling.embedding_bias:
        return None
    token_ids, biases = zip(*sampling.embedding_bias, strict=True)
    # NumPy reads tens of thousands of numbers in half the time that torch takes.
    ids, values = np.fromiter(token_ids, np.int64), np.fromiter(biases, np.float32)
    return to_device(torch.from_numpy(ids), device), to_device(torch.from_numpy(values), device)


def _add_bias(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        if sequence.bias is not None:
            token_ids, biases = sequence.bias
            logits[row, token_ids] = (logits[row, token_ids] + biases).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def _force(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Leave no token but the forced ones possible, in the rows that have any. These keep their logits."""
    forced = [(row, token_id) for row, s in enumerate(sequences) if (token_id := s.forced_token_id) is not None]
    if forced:
        rows, token_ids = to_device(torch.tensor(forced).T.contiguous(), logits.device)
        kept = logits[rows, token_ids]
        logits[rows] = -torch.inf
        logits[rows, token_ids] = kept


def _penalise_repetition(logits: torch.Tensor, rows: list[_Row]) -> None:
    """Divide positive and multiply negative logits of tokens in prompt and answer (CTRL, arXiv:1909.05858)."""
    penalised = [(row, s) for row, s in rows if s.request.sampling.repetition_penalty != 1.0]
    if entries := for_each_alone(penalised, _repeated):
        index, penalties = _split(entries, logits.device)
        scores = logits[index]
        logits[index] = torch.where(scores < 0, scores * penalties, scores / penalties).clamp(
            -LARGEST_LOGIT, LARGEST_LOGIT
        )


def _repeated(sequence: Sequence) -> _Values:
    return _history(sequence).seen.token_ids, sequence.request.sampling.repetition_penalty


def _penalise_frequency(logits: torch.Tensor, rows: list[_Row]) -> None:
    """Subtract from the tokens of the answer: frequency_penalty times their count, and presence_penalty (OpenAI)."""
    penalised = [
        (row, s)
        for row, s in rows
        if (s.request.sampling.frequency_penalty or s.request.sampling.presence_penalty) and s.output_token_ids
    ]
    if entries := for_each_alone(penalised, _answered):
        index, penalties = _split(entries, logits.device)
        logits[index] = (logits[index] - penalties).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def _answered(sequence: Sequence) -> _Values:
    sampling, answered = sequence.request.sampling, _history(sequence).answered
    return answered.token_ids, sampling.frequency_penalty * answered.counts + sampling.presence_penalty


def _forbid(logits: torch.Tensor, rows: list[_Row], end_token_ids: tuple[int, ...]) -> list[int]:
    found = for_each_alone(rows, lambda sequence: _forbidden(sequence, end_token_ids))
    entries: list[_Entry] = [(row, (token_ids, -np.inf)) for row, token_ids in found if len(token_ids)]
    if entries:
        index, _ = _split(entries, logits.device)
        logits[index] = -torch.inf
    return [row for row, _ in entries]


def _forbidden(sequence: Sequence, end_token_ids: tuple[int, ...]) -> TokenIds:
    if sequence.forced_token_id is not None:
        return _NO_TOKENS
    sampling = sequence.request.sampling
    ends = _forbidden_ends(sequence, end_token_ids)
    return np.concatenate([_history(sequence).forbidden(), ends]) if sampling.bad_token_sequences else ends


def _forbidden_ends(sequence: Sequence, end_token_ids: tuple[int, ...]) -> TokenIds:
    """The end tokens, and where they may not end it either the stop tokens, of an answer that may not end yet."""
    sampling = sequence.request.sampling
    if len(sequence.output_token_ids) + sequence.num_pending_tokens >= sampling.min_tokens:
        return _NO_TOKENS
    ends = end_tokens(sampling, end_token_ids)
    if sampling.min_tokens_holds_stops:
        stops = {stop[0] for stop in sampling.stop_token_sequences if len(stop) == 1}
        ends = (*ends, *sorted(stops.difference(ends)))
    return np.array(ends, np.int64)


def _adjust_on_device(
    logits: torch.Tensor, rows: list[_Row], end_token_ids: tuple[int, ...], tokens: DeviceTokens
) -> set[int]:
    """Penalties and bans of a step, by one copy to the device and one kernel for each of the two.

    Returns the rows that may have bans.
    """
    penalised = [(row, sequence) for row, sequence in rows if _is_penalised(sequence.request.sampling)]
    restricted = [(row, sequence) for row, sequence in rows if _may_have_bans(sequence)]
    if not penalised and not restricted:
        return set()
    bans = [
        np.stack([np.full_like(pairs[0], row), *pairs])
        for row, pairs in for_each_alone(restricted, lambda sequence: _bans(sequence, end_token_ids))
    ]
    tokens.counts.keep(sequence for _, sequence in penalised)
    placed = for_each_alone(penalised, tokens.counts.place_of)
    of_row = dict(penalised)
    samplings = [of_row[row].request.sampling for row, _ in placed]
    penalties = np.array([(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in samplings])
    arrays = (
        np.array([(row, *place) for row, place in placed], np.int64).reshape(-1, 3).T.copy(),
        np.ascontiguousarray(np.concatenate([*bans, np.empty((3, 0), np.int64)], axis=1)),
        penalties.view(np.int64),
    )
    places, bans_on_device, bits = arrays_to_device(arrays, logits.device)
    if len(penalties):
        penalise_tokens(logits, tokens.counts.counts, places, tokens.last_token_ids, bits.view(torch.float64))
    forbid_tokens(logits, bans_on_device, tokens.last_token_ids)
    return {row for row, _ in restricted}


def _is_adjusted(sequence: Sequence) -> bool:
    """Whether the request may change the logits of its sequence."""
    is_biased = sequence.bias is not None or sequence.guide is not None or sequence.forced_token_id is not None
    return is_biased or _is_penalised(sequence.request.sampling) or _may_have_bans(sequence)


def _is_penalised(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _may_have_bans(sequence: Sequence) -> bool:
    if sequence.forced_token_id is not None:
        return False
    sampling = sequence.request.sampling
    num_output_tokens = len(sequence.output_token_ids) + sequence.num_pending_tokens
    return bool(sampling.bad_token_sequences) or num_output_tokens < sampling.min_tokens


def _bans(sequence: Sequence, end_token_ids: tuple[int, ...]) -> Bans:
    """The last two rows of what `forbid_tokens` takes, [2, n]; the caller adds the row of the logits."""
    ends = _forbidden_ends(sequence, end_token_ids)
    bans = np.stack([ends, np.full_like(ends, ANY_TOKEN)])
    if sequence.request.sampling.bad_token_sequences:
        history = _history(sequence, counts_tokens=False)
        bans = np.concatenate([bans, history.bans(bool(sequence.num_pending_tokens))], axis=1)
    return bans


def _apply_guides(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    guided = [(row, s) for row, s in enumerate(sequences) if s.guide is not None and s.forced_token_id is None]
    if not (guides := for_each_alone(guided, _allowed)):
        return []
    rows, masks = zip(*guides, strict=True)
    words = to_device(torch.from_numpy(np.stack(masks)), logits.device).unsqueeze(-1)
    bits = (words >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    index = to_device(torch.tensor(rows), logits.device)
    logits[index] = logits[index].masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
    return list(rows)


def _allowed(sequence: Sequence) -> NDArray[np.int32]:
    assert sequence.guide is not None
    return sequence.guide.allowed


def _history(sequence: Sequence, counts_tokens: bool = True) -> TokenHistory:
    """The sequence's history, brought up to the last token that the host knows."""
    if sequence.history is None:
        sequence.history = TokenHistory(sequence.request, counts_tokens)
    history = sequence.history
    history.extend(sequence.token_ids(history.num_tokens, sequence.num_tokens))
    return history


def _split(entries: list[_Entry], device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows and token ids, which together index the logits, and the values, float32."""
    counts = [len(token_ids) for _, (token_ids, _) in entries]
    rows = np.repeat([row for row, _ in entries], counts)
    index = np.stack([rows, np.concatenate([token_ids for _, (token_ids, _) in entries])])
    values = np.concatenate(
        [np.broadcast_to(value, count) for (_, (_, value)), count in zip(entries, counts, strict=True)]
    )
    rows_and_ids = to_device(torch.from_numpy(index), device)
    return (rows_and_ids[0], rows_and_ids[1]), to_device(torch.from_numpy(values).float(), device)
