"""The next token of every sequence of a step, in one vectorised call over mixed parameters."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from multilora_engine.batch.transfer import FromDevice, to_device
from multilora_engine.request import TokenLogProb
from multilora_engine.sampling.beam_ranking import rank_continuations
from multilora_engine.sampling.logits import adjust_logits
from multilora_engine.sampling.token_counts import DeviceTokens
from multilora_engine.sequences.beam_search import Continuations
from multilora_engine.sequences.sequence import Sequence, for_each_alone
from multilora_kernels import SamplingRule, most_probable, rule_parameters, sample_tokens

_MIN_TEMPERATURE = 1e-6
"""Smaller temperatures draw the same, always the most probable token, but divide to infinities."""

_GREEDY = SamplingRule(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, uniform=0.0)


class SampledToken(msgspec.Struct, frozen=True):
    """The next token of one sequence, and the values of its choice that the request wants.

    token_id: None when the request's bans left nothing to choose.
    continuations: of a beam, from which the search chooses; its token_id and log_prob mean nothing.
    logits: the model's own, float32 [vocab].
    is_finite: False when the model's numbers overflowed, so that the rest means nothing.
    """

    token_id: int | None
    log_prob: TokenLogProb | None = None
    continuations: Continuations | None = None
    logits: bytes | None = None
    is_finite: bool = True


class Choice:
    """The choice of one token per sequence: a device makes it by itself, while the host may go on, until it is `read`.

    token_ids: int64 [len(sequences)], on the device.

    A sequence draws one uniform number a token from its own generator, so that its draws do not depend on the
    rest of the batch.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        end_token_ids: tuple[int, ...],
        tokens: DeviceTokens | None = None,
    ) -> None:
        """logits: [len(sequences), vocab], float32, changed in place. tokens: None where the host knows all of them.

        The logits must stay as they are until the choice is read, if any sequence's sampling `must_read_each_token`.
        """
        self.sequences = sequences
        self._logits = logits
        scored = [row for row, s in enumerate(sequences) if s.request.sampling.return_log_probs and s.search is None]
        scored_rows = _index(scored, logits) if scored else None
        log_probs = None if scored_rows is None else _rows(logits, scored_rows).log_softmax(dim=-1)
        self._kept = _own_logits(logits, sequences)
        self._restricted = adjust_logits(logits, sequences, end_token_ids, tokens)
        self.token_ids, are_sound = _choose(logits, sequences, tokens)
        # The probes with the tokens, since the logits may be another step's when these are read.
        probes = () if are_sound else (_probe(logits, self.token_ids),)
        self._on_host = FromDevice(self.token_ids, *probes)
        self._log_probs = None
        if log_probs is not None and scored_rows is not None:
            self._log_probs = _LogProbs(scored, log_probs, _rows(self.token_ids, scored_rows), sequences)

    def read(self) -> list[SampledToken]:
        """The tokens, in the order of the sequences. Waits for the device."""
        token_ids, *probes = self._on_host.wait()
        tokens = [SampledToken(token_id) for token_id in token_ids.tolist()]
        if self._log_probs is not None:
            self._log_probs.add_to(tokens)
        dead, overflown = self._failed(probes[0].numpy()) if probes else (set(), set())
        for row in dead:
            tokens[row] = SampledToken(None)
        if beams := [row for row, sequence in enumerate(self.sequences) if sequence.search is not None]:
            ranked = rank_continuations(self._logits[beams], [self.sequences[row] for row in beams])
            for row, continuations in zip(beams, ranked, strict=True):
                tokens[row] = SampledToken(None, continuations=continuations)
        if self._kept is not None:
            rows, logits = self._kept
            for row, values in zip(rows, logits.wait()[0].numpy(), strict=True):
                tokens[row] = msgspec.structs.replace(tokens[row], logits=values.tobytes())
        for row in overflown:
            tokens[row] = SampledToken(None, is_finite=False)
        return tokens

    def _failed(self, probes: NDArray[np.float32]) -> tuple[set[int], set[int]]:
        """The rows whose requests have forbidden every token, and those whose numbers overflowed."""
        dead = {row for row in self._restricted if probes[row, 0] == -math.inf}
        return dead, _overflown(probes) - dead


class _LogProbs:
    """The log-probs of some rows' tokens, chosen and most probable ones, on their way from the device."""

    def __init__(
        self, rows: list[int], log_probs: torch.Tensor, token_ids: torch.Tensor, sequences: list[Sequence]
    ) -> None:
        """rows: of the tokens. log_probs: [len(rows), vocab]. token_ids: [len(rows)], the chosen ones."""
        self._rows = rows
        self._num_top = [sequences[row].request.sampling.num_top_log_probs for row in rows]
        # The largest of each are looked for once, for all.
        top = log_probs.topk(max(self._num_top), dim=-1)
        self._on_host = FromDevice(log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top.values, top.indices)

    def add_to(self, tokens: list[SampledToken]) -> None:
        values, top_values, top_ids = (tensor.tolist() for tensor in self._on_host.wait())
        for i, (row, num_top) in enumerate(zip(self._rows, self._num_top, strict=True)):
            top = tuple(zip(top_ids[i][:num_top], top_values[i][:num_top], strict=True))
            tokens[row] = SampledToken(tokens[row].token_id, TokenLogProb(values[i], top))


def _own_logits(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], FromDevice] | None:
    """The sequences that ask for their logits, by row, and these; None for none."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.return_generation_logits]
    return (rows, FromDevice(logits.index_select(0, _index(rows, logits)))) if rows else None


def _choose(logits: torch.Tensor, sequences: list[Sequence], tokens: DeviceTokens | None) -> tuple[torch.Tensor, bool]:
    """The tokens, and whether their logits are on the host, finite and not zero: then nothing is left to probe."""
    drawn = [row for row, s in enumerate(sequences) if not s.request.sampling.is_greedy and s.search is None]
    if not drawn:
        return (logits.argmax(dim=-1), False) if logits.is_cuda else most_probable(logits)
    rules = [_GREEDY] * len(sequences)
    for row, rule in for_each_alone([(row, sequences[row]) for row in drawn], _rule):
        rules[row] = rule
    resets = [row for row in drawn if sequences[row].num_pending_tokens and sequences[row].request.sampling.has_decay]
    if resets:
        assert tokens is not None
        parameters = rule_parameters(rules, logits.device)
        _reset_top_p(parameters, resets, sequences, tokens)
        token_ids = sample_tokens(logits, parameters)
    else:
        token_ids = sample_tokens(logits, rules)
    return token_ids, _sees_no_overflow(logits, token_ids)


def _reset_top_p(parameters: torch.Tensor, rows: list[int], sequences: list[Sequence], tokens: DeviceTokens) -> None:
    """Set top_p back in rows whose pending token is their reset token."""
    index = _index(rows, parameters)
    samplings = [sequences[row].request.sampling for row in rows]
    reset_ids = _index([p.top_p_reset_id for p in samplings], parameters)
    top_p = to_device(torch.tensor([p.top_p for p in samplings], dtype=torch.float64), parameters.device)
    is_reset = tokens.last_token_ids[index] == reset_ids
    parameters[index, 2] = torch.where(is_reset, top_p, parameters[index, 2])


def _sees_no_overflow(logits: torch.Tensor, token_ids: torch.Tensor) -> bool:
    """As `_choose` says, of drawn tokens."""
    if logits.is_cuda:
        return False
    rows = logits.numpy()
    chosen = [rows.item(row, token_id) for row, token_id in enumerate(token_ids.tolist())]
    return all(map(math.isfinite, chosen)) and all(chosen)


def _probe(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits of the chosen tokens, and of a few over the whole vocabulary, [rows, 1 + some]."""
    distance = max(1, logits.shape[1] // 4)
    return torch.cat((logits.gather(1, token_ids.unsqueeze(1)), logits[:, ::distance]), dim=1)


def _overflown(probes: NDArray[np.float32]) -> set[int]:
    """The rows whose numbers overflowed in the model.

    A NaN counts as the largest logit, so it is chosen. Where the squares in the last norm overflow, but not the
    squared values, the norm makes zeros of everything; no logits of a model are by chance.
    """
    if np.isfinite(chosen := probes[:, 0]).all() and chosen.all():
        return set()
    is_wrong = ~np.isfinite(chosen) | ~probes.any(axis=1)
    return set(np.flatnonzero(is_wrong).tolist())


def _rule(sequence: Sequence) -> SamplingRule:
    p = sequence.request.sampling
    temperature = max(p.temperature, _MIN_TEMPERATURE)
    return SamplingRule(temperature, p.top_k, _top_p(sequence), p.min_p, sequence.random.random())


def _top_p(sequence: Sequence) -> float:
    """top_p decayed once for each token since the reset token, or the start (arXiv:2206.04624).

    A pending token counts as one that is not the reset token.
    """
    sampling = sequence.request.sampling
    if not sampling.has_decay:
        return sampling.top_p
    num_tokens = _num_since(sequence.output_token_ids, sampling.top_p_reset_id) + sequence.num_pending_tokens
    if num_tokens == 0:
        return sampling.top_p
    return max(sampling.top_p * sampling.top_p_decay**num_tokens, sampling.top_p_min)


def _num_since(token_ids: list[int], reset_id: int) -> int:
    """How many tokens follow the last `reset_id`; all without one."""
    # Not a loop: without the token, the whole answer is looked through for every token of it.
    return token_ids[::-1].index(reset_id) if reset_id in token_ids else len(token_ids)


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows in ascending order: x itself if it has no others, else a copy.

    On a CPU indexing with a tensor would take up to ten times as long.
    """
    return x if len(index) == len(x) else x.index_select(0, index)


def _index(rows: list[int], like: torch.Tensor) -> torch.Tensor:
    """`rows` to index with; a list would be copied to the device with a wait."""
    return to_device(torch.tensor(rows), like.device)
