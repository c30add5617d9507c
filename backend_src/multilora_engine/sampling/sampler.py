"""Chooses the next token of every sequence of a step, in one vectorised call. Each sequence has its own parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from multilora_engine.batch.transfer import FromDevice, to_device
from multilora_engine.request import TokenLogProb
from multilora_engine.sampling.logits import adjust_logits, are_adjusted
from multilora_engine.sampling.token_counts import DeviceTokens
from multilora_engine.sequences.beam_search import Continuations
from multilora_engine.sequences.sequence import Sequence, for_each_alone
from multilora_kernels import SamplingRule, most_probable, rule_parameters, sample_tokens

WORK_BYTES_PER_LOGIT = 24
"""Memory that the choices of a step take at the most, beside the step's own logits; those of the step before, which its
choice holds in asynchronous steps, are among it. The logits and log-probs of a prompt take half as much. Tests measure
both."""

_MIN_BEAM_TEMPERATURE = torch.finfo(torch.float32).tiny
"""The smallest normal float32: nothing rounds it to zero."""


@torch.inference_mode()
def rank_continuations(logits: torch.Tensor, beams: list[Sequence]) -> list[Continuations]:
    """The likeliest continuations of each beam. The beams may belong to several searches.

    logits: [len(beams), vocab], float32, after biases, penalties and bans.
    """
    count = min(max(beam.search.num_candidates for beam in beams if beam.search is not None), logits.shape[1])
    temperatures = [[max(beam.request.sampling.temperature, _MIN_BEAM_TEMPERATURE)] for beam in beams]
    scores = [[beam.score] for beam in beams]
    # The largest logit becomes 0 first. So a small temperature makes infinities only of tokens that have no chance.
    below_best = logits - logits.amax(dim=-1, keepdim=True)
    log_probs = (below_best / to_device(torch.tensor(temperatures), logits.device)).log_softmax(dim=-1)
    best = (log_probs + to_device(torch.tensor(scores), logits.device)).topk(count, dim=-1)
    return [Continuations(*row) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


_MIN_TEMPERATURE = 1e-6
"""Smaller temperatures would always draw the most probable token, too, but their divisions make infinities."""

_GREEDY = SamplingRule(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, uniform=0.0)


class SampledToken(msgspec.Struct, frozen=True):
    """The next token of one sequence, and the values that the request wants with it.

    token_id: None if the request's bans left no token to choose.
    continuations: for a beam, what the search chooses from. token_id and log_prob mean nothing then.
    logits: the model's own logits, float32 [vocab].
    is_finite: False if the model's numbers overflowed. The other fields mean nothing then.
    """

    token_id: int | None
    log_prob: TokenLogProb | None = None
    continuations: Continuations | None = None
    logits: bytes | None = None
    is_finite: bool = True


class Best(NamedTuple):
    """The most probable token of each row of logits, and what tells whether the row's numbers overflowed.

    token_ids: int64 [rows]. probes: float32 [rows, some], as `_probe` makes them.
    """

    token_ids: torch.Tensor
    probes: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Best:
        """logits: float32 [rows, vocab]. The host does not wait for the device."""
        token_ids = logits.argmax(dim=-1)
        return cls(token_ids, _probe(logits, token_ids))

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> Best:
        """Memory for `write`."""
        num_probed = cls.of(torch.zeros(1, vocab_size)).probes.shape[1]
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(token_ids, torch.zeros(num_rows, num_probed, device=device))

    def first(self, num_rows: int) -> Best:
        """The first rows, in the same memory."""
        return Best(self.token_ids[:num_rows], self.probes[:num_rows])

    def write(self, logits: torch.Tensor) -> None:
        """`of` the logits, of as many rows, in this memory."""
        torch.argmax(logits, dim=-1, out=self.token_ids)
        torch.cat(_probed(logits, self.token_ids), dim=1, out=self.probes)


class Choice:
    """The choice of one token for each sequence. The device makes it by itself; the host may go on and `read` it later.

    A sequence draws one uniform number for each token from its own generator. So its draws do not depend on the rest of
    the batch.

    token_ids: int64 [len(sequences)], on the device.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        end_token_ids: tuple[int, ...],
        tokens: DeviceTokens | None = None,
        best: Best | None = None,
    ) -> None:
        """logits: [len(sequences), vocab], float32, changed in place. tokens: None if the host knows all tokens.

        best: of these logits, if the step has computed it.
        If any sequence's sampling `must_read_each_token`, nobody may change the logits until the choice is read.
        """
        self.sequences = sequences
        self._logits = logits
        scored = [row for row, s in enumerate(sequences) if s.request.sampling.return_log_probs and s.search is None]
        scored_rows = _index(scored, logits) if scored else None
        log_probs = None if scored_rows is None else _rows(logits, scored_rows).log_softmax(dim=-1)
        self._kept = _own_logits(logits, sequences)
        if best is not None and are_adjusted(sequences):
            best = None
        self._restricted = adjust_logits(logits, sequences, end_token_ids, tokens)
        self.token_ids, probes = _choose(logits, sequences, tokens, best)
        # The probes travel with the tokens: when the probes are read, the logits may be of another step.
        self._on_host = FromDevice(self.token_ids, *(() if probes is None else (probes,)))
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
        """The rows whose requests have forbidden every token, and the rows whose numbers overflowed."""
        dead = {row for row in self._restricted if probes[row, 0] == -math.inf}
        return dead, _overflown(probes) - dead


class _LogProbs:
    """The log-probs of the chosen and the most probable tokens of some rows, on their way from the device."""

    def __init__(
        self, rows: list[int], log_probs: torch.Tensor, token_ids: torch.Tensor, sequences: list[Sequence]
    ) -> None:
        """rows: the rows that want log-probs. log_probs: [len(rows), vocab]. token_ids: [len(rows)], the choices."""
        self._rows = rows
        self._num_top = [sequences[row].request.sampling.num_top_log_probs for row in rows]
        # One search for all rows, for as many top tokens as the most demanding row wants.
        top = log_probs.topk(max(self._num_top), dim=-1)
        self._on_host = FromDevice(log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top.values, top.indices)

    def add_to(self, tokens: list[SampledToken]) -> None:
        values, top_values, top_ids = (tensor.tolist() for tensor in self._on_host.wait())
        for i, (row, num_top) in enumerate(zip(self._rows, self._num_top, strict=True)):
            top = tuple(zip(top_ids[i][:num_top], top_values[i][:num_top], strict=True))
            tokens[row] = SampledToken(tokens[row].token_id, TokenLogProb(values[i], top))


def _own_logits(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], FromDevice] | None:
    """The rows of the sequences that ask for their logits, and the logits; None if no sequence asks."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.return_generation_logits]
    return (rows, FromDevice(logits.index_select(0, _index(rows, logits)))) if rows else None


def _choose(
    logits: torch.Tensor, sequences: list[Sequence], tokens: DeviceTokens | None, best: Best | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens and their probes: None if the tokens' logits are known to be finite and not zero.

    Only logits in the host's memory can be known so. best: of the logits as they are; None if nobody has computed it.
    """
    drawn = [row for row, s in enumerate(sequences) if not s.request.sampling.is_greedy and s.search is None]
    if not drawn:
        if best is not None or logits.is_cuda:
            return best or Best.of(logits)
        token_ids, are_sound = most_probable(logits)
        return token_ids, None if are_sound else _probe(logits, token_ids)
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
    return token_ids, None if _sees_no_overflow(logits, token_ids) else _probe(logits, token_ids)


def _reset_top_p(parameters: torch.Tensor, rows: list[int], sequences: list[Sequence], tokens: DeviceTokens) -> None:
    """Set top_p back in the rows whose pending token is their reset token."""
    index = _index(rows, parameters)
    samplings = [sequences[row].request.sampling for row in rows]
    reset_ids = _index([p.top_p_reset_id for p in samplings], parameters)
    top_p = to_device(torch.tensor([p.top_p for p in samplings], dtype=torch.float64), parameters.device)
    is_reset = tokens.last_token_ids[index] == reset_ids
    parameters[index, 2] = torch.where(is_reset, top_p, parameters[index, 2])


def _sees_no_overflow(logits: torch.Tensor, token_ids: torch.Tensor) -> bool:
    """Whether the logits of drawn tokens are known to be finite and not zero, as `_choose` tells."""
    if logits.is_cuda:
        return False
    rows = logits.numpy()
    chosen = [rows.item(row, token_id) for row, token_id in enumerate(token_ids.tolist())]
    return all(map(math.isfinite, chosen)) and all(chosen)


def _probe(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits of the chosen tokens and of a few tokens from all over the vocabulary, [rows, 1 + some]."""
    return torch.cat(_probed(logits, token_ids), dim=1)


def _probed(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of `_probe`."""
    distance = max(1, logits.shape[1] // 4)
    return logits.gather(1, token_ids.unsqueeze(1)), logits[:, ::distance]


def _overflown(probes: NDArray[np.float32]) -> set[int]:
    """The rows whose numbers overflowed in the model.

    A NaN counts as the largest logit, so it is chosen. If squares overflow in the last norm, but not the values that
    are squared, the norm turns all values into zeros, and so all logits are 0. No sound model gives such logits.
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
    """top_p, decayed once for each token since the reset token, or since the start (arXiv:2206.04624).

    A pending token counts as a token that is not the reset token.
    """
    sampling = sequence.request.sampling
    if not sampling.has_decay:
        return sampling.top_p
    num_tokens = _num_since(sequence.output_token_ids, sampling.top_p_reset_id) + sequence.num_pending_tokens
    if num_tokens == 0:
        return sampling.top_p
    return max(sampling.top_p * sampling.top_p_decay**num_tokens, sampling.top_p_min)


def _num_since(token_ids: list[int], reset_id: int) -> int:
    """The number of tokens after the last `reset_id`; all tokens if it does not occur."""
    # No Python loop: without the reset token, each new token searches the whole answer.
    return token_ids[::-1].index(reset_id) if reset_id in token_ids else len(token_ids)


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of `x` that `index` names, in ascending order: `x` itself if it has no others, else a copy.

    On a CPU, indexing with a tensor would take up to ten times as long as `index_select`.
    """
    return x if len(index) == len(x) else x.index_select(0, index)


def _index(rows: list[int], like: torch.Tensor) -> torch.Tensor:
    """`rows` as a tensor to index with. torch would wait for the device to copy a list."""
    return to_device(torch.tensor(rows), like.device)
