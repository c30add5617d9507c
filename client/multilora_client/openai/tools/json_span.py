"""`JsonSpan`: finds where a JSON object, list or string ends while its text arrives."""

from __future__ import annotations


class JsonSpan:
    """Follows brackets and quotes, and checks nothing else."""

    def __init__(self, depth: int = 0) -> None:
        """depth: how many brackets are open already."""
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """How much of the next piece of text belongs to the value; None for all of it, and more is to come."""
        for position, character in enumerate(text, start=1):
            self._take(character)
            if not self._depth and not self._is_in_string:
                return position
        return None

    def _take(self, character: str) -> None:
        if self._is_in_string:
            self._is_in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._is_in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
