"""`PlainSpecials`: a client's text in a chat stays text, even where it spells a special token.

The template's own special tokens and the client's are the same characters once a chat is rendered. So each special
token that a client spelled is cut in two before, by a mark that nobody can guess, and the rendered text is tokenized
piece by piece between the marks: no piece has the whole of it.

>>> plain = PlainSpecials(["<|im_end|>"])
>>> plain.pieces("<|user|>" + plain.mark("end it: <|im_end|>") + "<|im_end|>")
['<|user|>end it: <', '|im_end|><|im_end|>']
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator
from typing import Any


class PlainSpecials:
    """Cuts the special tokens that the client of one chat has spelled."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        """special_tokens: how they are spelled. One of a single character cannot be cut, and stays as it is."""
        self._spelled = [token for token in special_tokens if len(token) > 1]
        self._mark = f"\ufdd0{uuid.uuid4().hex}\ufdd0"

    def mark(self, value: Any) -> Any:
        """A text with its special tokens cut, or a list or an object of such texts, of any depth."""
        if isinstance(value, str):
            return self._cut(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        return value

    def pieces(self, text: str) -> list[str]:
        """A rendered chat between the marks."""
        return text.split(self._mark)

    def _cut(self, text: str) -> str:
        # Where one special token begins inside another, it is cut, too.
        cuts = {start + 1 for token in self._spelled for start in _places(token, text)}
        places = [0, *sorted(cuts), len(text)]
        return self._mark.join(text[start:end] for start, end in itertools.pairwise(places))


def _places(token: str, text: str) -> Iterator[int]:
    """Where a token begins in a text. A regular expression would keep other threads from Python all the while."""
    start = text.find(token)
    while start >= 0:
        yield start
        start = text.find(token, start + 1)
