"""`Usage`: how many tokens a request has used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multilora_client.generation import Alternative, Answer


@dataclass(frozen=True)
class TokenCounts:
    """num_cached_tokens: the prompt's tokens that were computed before; None from servers that do not say."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None


class Usage:
    """Adds up prompts and choices. Each answer, or piece of one, tells totals of its own, so the latest one counts."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int | None]] = {}
        self._choices: dict[int, int] = {}

    def see(self, prompt_index: int, answer: Answer, choices: Iterable[tuple[int, Alternative | Answer]]) -> None:
        """choices: the choices of this prompt that the answer tells of, by their indices."""
        num_tokens, num_cached = self._prompts.get(prompt_index, (0, None))
        self._prompts[prompt_index] = (
            num_tokens if answer.num_input_tokens is None else answer.num_input_tokens,
            num_cached if answer.num_cached_tokens is None else answer.num_cached_tokens,
        )
        for index, choice in choices:
            self._choices[index] = choice.num_output_tokens or 0

    @property
    def counts(self) -> TokenCounts:
        cached = [num_cached for _, num_cached in self._prompts.values() if num_cached is not None]
        return TokenCounts(
            sum(num_tokens for num_tokens, _ in self._prompts.values()),
            sum(self._choices.values()),
            sum(cached) if cached else None,
        )

    def body(self) -> dict[str, object]:
        """The usage as chats and completions tell it."""
        counts = self.counts
        body: dict[str, object] = {
            "prompt_tokens": counts.num_prompt_tokens,
            "completion_tokens": counts.num_completion_tokens,
            "total_tokens": counts.num_prompt_tokens + counts.num_completion_tokens,
        }
        if counts.num_cached_tokens is not None:
            body["prompt_tokens_details"] = {"cached_tokens": counts.num_cached_tokens}
        return body
