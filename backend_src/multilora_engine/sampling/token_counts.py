"""`TokenCounts`: counts each token of a sequence on the device, which counts a token before the host knows it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from multilora_engine.batch.transfer import arrays_to_device
from multilora_engine.sequences.sequence import Sequence

_IN_PROMPT, _IN_ANSWER = 1, 2

_NOTHING_KNOWN = -1
"""Stands for the number of counted tokens while they are being counted."""


class TokenCounts:
    """Places for as many sequences as a step may have, in a tensor that `penalise_tokens` changes.

    A sequence keeps its place until another sequence needs one: the least recently used place goes first. The tokens of
    a sequence that lost its place are counted again. So nobody has to tell when a sequence ends.
    """

    def __init__(self, num_places: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_places, vocab_size, dtype=torch.int32, device=device)
        self._num_counted: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """By a sequence's `arrival`: its place, and how many tokens are counted there. The latest use is last."""

    @staticmethod
    def num_bytes(num_places: int, vocab_size: int) -> int:
        """The memory that the counts take."""
        return num_places * vocab_size * torch.int32.itemsize

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Keep the places of a step's sequences, so that none loses its place to another one of the step.

        sequences: at most as many as there are places.
        """
        for sequence in sequences:
            if sequence.arrival in self._num_counted:
                self._num_counted.move_to_end(sequence.arrival)

    def place_of(self, sequence: Sequence) -> tuple[int, int]:
        """The place of a sequence of the step, and 1 if the device is yet to count its last token, else 0.

        All its other tokens are counted on return. The caller has `penalise_tokens` count the last one.
        """
        place, num_counted = self._num_counted.get(sequence.arrival, (None, 0))
        if place is None or num_counted < sequence.num_tokens - 1:
            place = self._free_place() if place is None else place
            self._num_counted[sequence.arrival] = place, _NOTHING_KNOWN
            num_counted = self._count_anew(place, sequence)
        self._num_counted[sequence.arrival] = place, sequence.num_tokens
        self._num_counted.move_to_end(sequence.arrival)
        return place, sequence.num_tokens - num_counted

    def _free_place(self) -> int:
        if len(self._num_counted) < len(self.counts):
            return len(self._num_counted)
        _, (place, _) = self._num_counted.popitem(last=False)
        return place

    def _count_anew(self, place: int, sequence: Sequence) -> int:
        """Count all tokens that the host knows. Returns their number."""
        prompt, answer = sequence.request.prompt_token_ids, sequence.output_token_ids
        counts = Counter(dict.fromkeys(prompt, _IN_PROMPT))
        counts.update({token_id: _IN_ANSWER * count for token_id, count in Counter(answer).items()})
        arrays = np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)
        token_ids, values = arrays_to_device(arrays, self.counts.device)
        self.counts[place].zero_().index_put_((token_ids,), values.int())
        return len(prompt) + len(answer)


@dataclass(frozen=True)
class DeviceTokens:
    """The tokens of a step, in which only the device may know the last token of each sequence.

    input_ids: the step's tokens. last_rows: the last row of each sequence whose next token is wanted, [rows] int64.
    """

    counts: TokenCounts
    input_ids: torch.Tensor
    last_rows: torch.Tensor

    @cached_property
    def last_token_ids(self) -> torch.Tensor:
        """The last token of each sequence whose next token is wanted, [rows] int64."""
        return self.input_ids.index_select(0, self.last_rows)
