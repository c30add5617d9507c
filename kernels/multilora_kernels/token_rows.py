"""Rows of tokens: an adapter's own embeddings of some tokens, and its own rows of the head for some tokens.

Everything is PyTorch on the device, and nothing waits for the device. No step without such adapters comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

PADDED_ROWS = 64
"""Adapters with at most so many rows of the head are computed together, each padded to the largest of them."""

_GATHERED_VALUES = 1 << 22
"""Values of rows that are gathered for one product: rows of more logits are multiplied adapter by adapter."""


@dataclass(frozen=True)
class TokenRows:
    """Rows of one adapter. token_ids: [n] int64, ascending. first: the place of the first row in the arena."""

    token_ids: torch.Tensor
    first: int


class TokenRowTables:
    """The rows of the adapters of a step.

    Its tensors depend on the adapters alone, and not on the tokens of the step.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        rows: Mapping[int, TokenRows],
        hidden_size: int,
        vocab_size: int,
        max_loras: int,
    ) -> None:
        """arena: [num_elements], floats. rows: by `lora_index`, of at least one adapter."""
        self._arena, self._hidden_size, self._vocab_size = arena, hidden_size, vocab_size
        self._rows = dict(sorted(rows.items()))
        device, places = arena.device, [self._places(part) for part in self._rows.values()]
        keys = [index * vocab_size + part.token_ids for index, part in self._rows.items()]
        self._keys, self._offsets = torch.cat(keys), torch.cat(places)
        small = [(index, part) for index, part in self._rows.items() if len(part.token_ids) <= PADDED_ROWS]
        self._large = [index for index, part in self._rows.items() if len(part.token_ids) > PADDED_ROWS]
        # The last row is of the tokens without such rows: a mapping of -1 finds it as Python's index does.
        groups = [len(small)] * (max_loras + 1)
        longest = max((len(part.token_ids) for _, part in small), default=0)
        self._padded_ids = torch.zeros(len(small) + 1, longest, dtype=torch.int64, device=device)
        self._padded_offsets = torch.zeros_like(self._padded_ids)
        for group, (index, part) in enumerate(small):
            groups[index] = group
            # Padding repeats the first row, with the same result at the same place.
            self._padded_ids[group] = _padded(part.token_ids, longest)
            self._padded_offsets[group] = _padded(self._places(part), longest)
        self._groups = torch.tensor(groups, device=device)
        self._num_small = len(small)

    def replace_embeddings(self, x: torch.Tensor, token_ids: torch.Tensor, mapping: torch.Tensor) -> torch.Tensor:
        """x with the rows of the tokens whose adapters have rows of their own.

        x: [num_tokens, hidden_size]. token_ids, mapping: [num_tokens] int64, the mapping -1 for the base model.
        """
        keys = torch.where(mapping < 0, -1, mapping * self._vocab_size + token_ids)
        places = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        is_found = self._keys[places] == keys
        rows = self._gathered(self._offsets[places]).to(x.dtype)
        return torch.where(is_found[:, None], rows, x)

    def replace_logits(self, logits: torch.Tensor, x: torch.Tensor, mapping: torch.Tensor) -> None:
        """Write, in place, logits[i, token] = x[i] . row for each row of the adapter of i.

        logits: [n, vocab_size], float32 or in the dtype of x. x: [n, hidden_size]. mapping: [n] int64, -1 for the base
            model.
        """
        one_by_one = self._large
        if self._num_small:
            if len(x) * self._padded_ids.shape[1] * self._hidden_size <= _GATHERED_VALUES:
                self._replace_padded(logits, x, mapping)
            else:
                one_by_one = list(self._rows)
        for index in one_by_one:
            part = self._rows[index]
            values = x @ self._matrix(part).to(x.dtype).T
            self._write(logits, part.token_ids.expand(len(x), -1), values, mapping == index)

    def _replace_padded(self, logits: torch.Tensor, x: torch.Tensor, mapping: torch.Tensor) -> None:
        groups = self._groups[mapping]
        offsets = self._padded_offsets[groups]
        rows = self._gathered(offsets.flatten()).view(*offsets.shape, self._hidden_size).to(x.dtype)
        values = torch.bmm(rows, x.unsqueeze(2)).squeeze(2)
        self._write(logits, self._padded_ids[groups], values, groups < self._num_small)

    @staticmethod
    def _write(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor, is_changed: torch.Tensor) -> None:
        before = logits.gather(1, token_ids)
        logits.scatter_(1, token_ids, torch.where(is_changed[:, None], values, before))

    def _places(self, part: TokenRows) -> torch.Tensor:
        count = len(part.token_ids)
        return part.first + torch.arange(count, device=part.token_ids.device) * self._hidden_size

    def _gathered(self, offsets: torch.Tensor) -> torch.Tensor:
        """[len(offsets), hidden_size]: rows begin at any element of the arena."""
        size = self._hidden_size
        return self._arena.as_strided((self._arena.numel() - size + 1, size), (1, 1)).index_select(0, offsets)

    def _matrix(self, part: TokenRows) -> torch.Tensor:
        """All rows of an adapter, as they lie."""
        count = len(part.token_ids)
        return self._arena[part.first : part.first + count * self._hidden_size].view(count, self._hidden_size)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((values, values[:1].expand(length - len(values))))
