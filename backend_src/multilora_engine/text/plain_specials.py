"""`PlainSpecials`: a client's text in a chat stays text, even where it spells a special token.

In a rendered chat, special tokens of the template and of the client are the same characters. So each special token that
a client spelled is cut in two before the chat is rendered, by a mark that nobody can guess. The rendered text is
tokenized piece by piece between the marks, so no piece contains the client's whole special token.

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
        """special_tokens: their spellings. A special token of one character cannot be cut and is left as it is."""
        self._spelled = [token for token in special_tokens if len(token) > 1]
        self._mark = f"\ufdd0{uuid.uuid4().hex}\ufdd0"

    def mark(self, value: Any) -> Any:
        """The value with the special tokens cut in all its texts. Lists and objects may be nested to any depth."""
        if isinstance(value, str):
            return self._cut(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        return value

    def pieces(self, text: str) -> list[str]:
        """The pieces of a rendered chat between the marks."""
        return text.split(self._mark)

    def _cut(self, text: str) -> str:
        # A special token that begins inside another one is cut, too.
        cuts = {start + 1 for token in self._spelled for start in _places(token, text)}
        places = [0, *sorted(cuts), len(text)]
        return self._mark.join(text[start:end] for start, end in itertools.pairwise(places))


def _places(token: str, text: str) -> Iterator[int]:
    """The places where a token begins in a text. A regular expression would hold the interpreter lock all the while."""
    start = text.find(token)
    while start >= 0:
        yield start
        start = text.find(token, start + 1)
