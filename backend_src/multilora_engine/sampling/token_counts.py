"""`TokenCounts`: how often sequences have each token, on the device, which counts a token before the host knows it."""

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
"""In the place of a number of counted tokens: until they are counted."""


class TokenCounts:
    """A place for each of as many sequences as a step may have, in a tensor that `penalise_tokens` changes.

    A place belongs to a sequence until another one needs it, those used least recently first; who has lost it is
    counted anew. So nobody has to say when a sequence ends.
    """

    def __init__(self, num_places: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_places, vocab_size, dtype=torch.int32, device=device)
        self._num_counted: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """By `Sequence.arrival`: its place, and how many of its tokens are counted there; the latest use last."""

    @staticmethod
    def num_bytes(num_places: int, vocab_size: int) -> int:
        """The memory that it takes."""
        return num_places * vocab_size * torch.int32.itemsize

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """None of a step's sequences, no more than there are places, loses its place to another one of them."""
        for sequence in sequences:
            if sequence.arrival in self._num_counted:
                self._num_counted.move_to_end(sequence.arrival)

    def place_of(self, sequence: Sequence) -> tuple[int, int]:
        """The place of a sequence of the step, and 1 where `penalise_tokens` is to count its last token, else 0.

        All its other tokens are counted by then; the caller has the device count that one.
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
        """Count all tokens that the host knows. How many there are."""
        prompt, answer = sequence.request.prompt_token_ids, sequence.output_token_ids
        counts = Counter(dict.fromkeys(prompt, _IN_PROMPT))
        counts.update({token_id: _IN_ANSWER * count for token_id, count in Counter(answer).items()})
        arrays = np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)
        token_ids, values = arrays_to_device(arrays, self.counts.device)
        self.counts[place].zero_().index_put_((token_ids,), values.int())
        return len(prompt) + len(answer)


@dataclass(frozen=True)
class DeviceTokens:
    """The tokens of a step where the device alone may know the last one of each sequence.

    input_ids: of the step. last_rows: of its sequences whose next token is wanted, their last rows, [rows] int64.
    """

    counts: TokenCounts
    input_ids: torch.Tensor
    last_rows: torch.Tensor

    @cached_property
    def last_token_ids(self) -> torch.Tensor:
        """[rows] int64."""
        return self.input_ids.index_select(0, self.last_rows)
