"""`TokenHistory`: counts a sequence's tokens for penalties, and follows its bad words, token by token."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from multilora_engine.request import GenerationRequest
from multilora_engine.text.automaton import ROOT, Automaton

TokenIds = NDArray[np.int64]

Bans = NDArray[np.int64]
"""[2, n]: forbidden tokens, and for each the last token after which it is forbidden, or ANY_TOKEN."""

ANY_TOKEN = -1
"""Stands for any last token."""


class TokenTally:
    """The different tokens of a sequence, and how often each occurs. One more token costs constant time."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        tally = Counter(token_ids)
        self._places = {token_id: place for place, token_id in enumerate(tally)}
        self._token_ids = np.array(list(tally), np.int64)
        self._counts = np.array(list(tally.values()), np.int64)

    @property
    def token_ids(self) -> TokenIds:
        """The different tokens, [n]."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `token_ids` occurs, [n]."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids, self._counts = _longer(self._token_ids), _longer(self._counts)
        self._token_ids[place] = token_id
        self._counts[place] += 1

    def copy(self) -> TokenTally:
        tally = copy.copy(self)
        tally._places = self._places.copy()
        tally._token_ids, tally._counts = self._token_ids.copy(), self._counts.copy()
        return tally


class BadWords:
    """The token sequences that a request forbids, by the tokens before their last one. Forks share this object."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        """sequences: each has at least one token."""
        last_tokens: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *prefix, last in sequences:
            last_tokens[tuple(prefix)].append(last)
        self.longest_prefix = max(map(len, last_tokens), default=0)
        self._always = np.array(last_tokens.pop((), []), np.int64)
        # Lists, because thousands of small arrays take milliseconds to make, and few are ever needed.
        self._last_tokens = dict(last_tokens)
        self._prefixes: Automaton[int] = Automaton(self._last_tokens)
        self._bans: dict[int, Bans] = {}

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token. The state before the first token is ROOT."""
        return self._prefixes.step(state, token_id)

    def completions(self, state: int) -> TokenIds:
        """The tokens that would complete a forbidden sequence, [n]."""
        prefixes = self._prefixes.words(state)
        return np.concatenate([self._always, *(self._last_tokens[tuple(prefix)] for prefix in prefixes)])

    def completions_after(self, state: int) -> Bans:
        """`completions` after one more token, for every token that it may be."""
        always = np.stack([self._always, np.full_like(self._always, ANY_TOKEN)])
        return np.concatenate([always, *map(self._bans_of, self._prefixes.suffixes(state))], axis=1)

    def _bans_of(self, state: int) -> Bans:
        """The bans of the prefixes that consist of all tokens of a state and one more token."""
        if (bans := self._bans.get(state)) is None:
            prefixes = map(tuple, self._prefixes.words_one_longer(state)) if self._last_tokens else ()
            pairs = [(last, prefix[-1]) for prefix in prefixes for last in self._last_tokens[prefix]]
            bans = self._bans[state] = np.array(pairs, np.int64).reshape(-1, 2).T
        return bans


class TokenHistory:
    """The tokens of one sequence, as penalties and bad words need them.

    num_tokens: the number of tokens seen so far: the whole prompt from the start, then the answer's.
    seen: the tokens of prompt and answer, for a repetition penalty.
    answered: the answer's tokens alone, for presence and frequency penalties. Both tallies stay empty if the request
        has no such penalty.
    """

    def __init__(self, request: GenerationRequest, counts_tokens: bool = True) -> None:
        """counts_tokens: False if `TokenCounts` counts them."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        self.num_tokens = len(prompt)
        self._counts_all = counts_tokens and sampling.repetition_penalty != 1.0
        self._counts_answer = counts_tokens and bool(sampling.frequency_penalty or sampling.presence_penalty)
        self.seen = TokenTally(prompt if self._counts_all else ())
        self.answered = TokenTally()
        self._bad_words = BadWords(sampling.bad_token_sequences)
        self._bad_state = ROOT
        # Earlier tokens cannot be part of a prefix.
        self._follow_bad_words(prompt[max(0, len(prompt) - self._bad_words.longest_prefix) :])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add further tokens of the answer."""
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            if self._counts_all:
                self.seen.add(token_id)
            if self._counts_answer:
                self.answered.add(token_id)
        self._follow_bad_words(token_ids)

    def forbidden(self) -> TokenIds:
        """The tokens that would complete a bad word, [n]. The beginning of the word may lie in the prompt."""
        return self._bad_words.completions(self._bad_state)

    def bans(self, is_token_pending: bool) -> Bans:
        """The bans of the next token. is_token_pending: whether a token comes first that only the device knows."""
        if is_token_pending:
            return self._bad_words.completions_after(self._bad_state)
        forbidden = self.forbidden()
        return np.stack([forbidden, np.full_like(forbidden, ANY_TOKEN)])

    def fork(self) -> TokenHistory:
        """A copy that goes on by itself from here."""
        fork = copy.copy(self)
        fork.seen, fork.answered = self.seen.copy(), self.answered.copy()
        return fork

    def _follow_bad_words(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._bad_state = self._bad_words.step(self._bad_state, token_id)


def _longer(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values, then at least as many zeros."""
    return np.concatenate([values, np.zeros(len(values) + 16, np.int64)])
