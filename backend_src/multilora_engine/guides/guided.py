"""Guided decoding: answers that always parse. A grammar says after every token which tokens may follow.

The grammars themselves are llguidance's work; here are its masks, the meaning of an end token to them, and what is kept
of compiled guides.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from multilora_engine.errors import InvalidRequest
from multilora_engine.guides.guide_grammar import (
    MAX_LEXER_BYTES,
    LongestFirst,
    TokenTable,
    make_matcher,
    make_tokenizer,
)
from multilora_engine.guides.guide_sandbox import GuideSandbox, GuideWatch
from multilora_engine.guides.guide_sandbox_process import Trial
from multilora_engine.log_lines import one_line
from multilora_engine.request import Guide
from multilora_engine.text.tokenizer import Tokenizer

_MAX_KEPT_BYTES = 40 << 20
"""The most memory that one compiled guide may keep. 700 integers with bounds, in 64 kB, keep 36 MB."""

_MAX_CACHED_BYTES = 48 << 20
"""The most memory of compiled guides that are kept for further requests, their lexers at their largest."""

_MAX_TRIALS_BYTES = 4 << 20
"""The most bytes of the texts of guides, and of their grammars, that need no further trial."""

_MAX_REFUSED_BYTES = 1 << 20
"""The most bytes of the texts of guides that need no trial to be refused."""

_REFUSED_S = 60.0
"""For so long. A limit may have been exceeded because the machine was slow."""

_MAX_TOKENS_OF_A_LEXER = 20_000
"""A lexer grows with the tokens of all answers that it guides, and ends them at its limit. So further answers get a new
one then."""

_MAX_BUILD_S = 1.0
"""The most seconds of a processor that the engine compiles a guide for. A legal one of 64 kB takes 0.4."""

_STACK_BYTES = 64 << 20
"""Of the thread that compiles, several times what the sandbox has. Memory is taken as it is used."""

_MAX_ERROR_CHARS = 500

_Value = TypeVar("_Value")


@dataclass(eq=False)
class CompiledGuide:
    """A guide that has been compiled, at the start of its grammar.

    allowed: bitmask of the tokens that may come first, as the grammar has it. may_end: whether an empty answer parses.
    kept_bytes: of memory, that it keeps. copy_bytes: that each `GuideMatcher` takes beside. num_tokens: that it has
    guided.
    """

    matcher: LLMatcher
    allowed: NDArray[np.int32]
    may_end: bool
    kept_bytes: int
    copy_bytes: int
    num_tokens: int = 0

    @property
    def is_worn(self) -> bool:
        """Whether further answers need a new lexer."""
        return self.num_tokens >= _MAX_TOKENS_OF_A_LEXER


class GuideMatcher:
    """The place of one sequence's answer in its grammar.

    compiled: the guide, which the matchers of all its answers share.
    allowed: int32 [ceil(vocab / 32)], bit i of word w is token 32 w + i: the tokens that may come next. An end token
        may when the answer parses as it is.
    """

    def __init__(self, compiled: CompiledGuide, text_tokens: NDArray[np.int32], end_tokens: NDArray[np.int32]) -> None:
        """text_tokens, end_tokens: bitmasks of the tokens that mean text, and of the tokens that end this sequence.

        Raises InvalidRequest when the grammar allows no answer with a token."""
        self.compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._text_tokens = text_tokens & ~end_tokens
        self._end_tokens = end_tokens
        # The mask was computed with the guide: another thread that computes one holds up the answers of this guide.
        if self._allow(compiled.allowed, compiled.may_end):
            raise InvalidRequest("the guide allows nothing but an empty answer")

    @property
    def num_bytes(self) -> int:
        """Of memory, beside what `compiled` keeps."""
        return self.compiled.copy_bytes + self.allowed.nbytes

    def advance(self, token_id: int) -> bool:
        """Take the token that was chosen; whether the answer is complete: it parses, and no text can follow.

        Raises InvalidRequest when the answer cannot go on, which ends the sequence: the grammar exceeded a limit.
        """
        assert _contains(self.allowed, token_id), f"token {token_id} is against the guide"
        if _contains(self._end_tokens, token_id):
            return True
        self.compiled.num_tokens += 1
        self._matcher.consume_token(token_id)
        try:
            allowed = _next_tokens(self._matcher)
        except InvalidRequest:
            self.compiled.num_tokens = _MAX_TOKENS_OF_A_LEXER
            raise
        return self._allow(allowed, self._matcher.is_accepting())

    def _allow(self, allowed: NDArray[np.int32], may_end: bool) -> bool:
        """Note the tokens that may come next; whether there are none."""
        self.allowed = allowed[: len(self._text_tokens)] & self._text_tokens
        has_next = bool(self.allowed.any())
        if not has_next and not may_end:
            raise InvalidRequest("the guide wants text that no token of this model spells")
        if may_end:
            self.allowed |= self._end_tokens
        return not has_next


class _SpelledTokens(LongestFirst):
    """Our tokenizer as llguidance wants one. It could read tokenizer.json itself, but then the text that it checks and
    the text that clients get would have two authors."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable) -> None:
        super().__init__(table)
        self._tokenizer = tokenizer

    def _spell(self, text: str) -> list[int]:
        """The tokenizer's own tokens spell a text as the model was trained to see it, unless it puts a space in front,
        as sentencepiece ones do; then the longest that fit."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(map(self._tokenizer.token_bytes, token_ids))
        return token_ids if spelled == text.encode() else super()._spell(text)


class GuideCompiler:
    """Guides to matchers, for one tokenizer and a model whose logits are `vocab_size` wide. For several threads.

    What a client sent is read and compiled in the sandbox first. The engine's process compiles what the sandbox
    survived, in one thread, which computes while the cores have nothing else to do, such as in the pauses of a step.
    One, because the C library keeps the memory that each thread needed while it compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        table = _token_table(tokenizer, vocab_size)
        self._tokenizer = make_tokenizer(_SpelledTokens(tokenizer, table))
        with_text = [token_id for token_id in range(vocab_size) if tokenizer.token_bytes(token_id)]
        self._text_tokens = self._mask(with_text) & ~self._mask([table.eos_token_id])
        self._sandbox = GuideSandbox(table)
        self._builder = _make_builder()
        self._lock = threading.Lock()
        self._in_use: WeakValueDictionary[Guide, CompiledGuide] = WeakValueDictionary()
        self._compiled: _Recent[CompiledGuide] = _Recent(_MAX_CACHED_BYTES)
        self._trials: _Recent[Trial] = _Recent(_MAX_TRIALS_BYTES)
        self._refused: _Recent[tuple[float, str]] = _Recent(_MAX_REFUSED_BYTES)

    def start(self) -> None:
        """Start the sandbox, which the first guide would wait for. Raises OSError."""
        self._sandbox.start()

    def close(self) -> None:
        """End the sandbox, and the thread after the guide that it compiles."""
        self._sandbox.close()
        self._builder.shutdown(cancel_futures=True)

    def matcher(self, guide: Guide, end_tokens: tuple[int, ...], watch: GuideWatch | None = None) -> GuideMatcher:
        """A matcher at the start of the answer.

        Raises InvalidRequest for a guide that is malformed or exceeds a limit, Unavailable when the sandbox is broken,
        Cancelled when nobody wants the guide any more.
        """
        compiled = self._known(guide) or self._compile(guide, watch or GuideWatch())
        return GuideMatcher(compiled, self._text_tokens, self._mask(end_tokens))

    def _known(self, guide: Guide) -> CompiledGuide | None:
        """Raises InvalidRequest for a guide that was refused a moment ago."""
        with self._lock:
            compiled = self._compiled.get(guide) or self._in_use.get(guide)
            if compiled is not None:
                return None if compiled.is_worn else compiled
            at_s, error = self._refused.get(guide) or (0.0, "")
        if error and time.monotonic() < at_s + _REFUSED_S:
            raise InvalidRequest(error)
        return None

    def _compile(self, guide: Guide, watch: GuideWatch) -> CompiledGuide:
        with self._lock:
            trial = self._trials.get(guide)
        try:
            trial = trial or self._sandbox.try_guide(guide, watch)
            compiled, seconds = self._builder.submit(self._build, guide, trial).result()
            watch.seconds += seconds
        except InvalidRequest as error:
            with self._lock:
                self._refused.put(guide, (time.monotonic(), str(error)), guide.num_bytes)
            raise
        with self._lock:
            self._trials.put(guide, trial, guide.num_bytes + len(trial.grammar))
            self._in_use[guide] = compiled
            self._compiled.put(guide, compiled, compiled.kept_bytes + MAX_LEXER_BYTES)
        return compiled

    def _build(self, guide: Guide, trial: Trial) -> tuple[CompiledGuide, float]:
        """The seconds of a processor that it took, too."""
        started_s = time.thread_time()
        name = f"the {guide.type} guide of {guide.num_bytes} bytes"
        if trial.kept_bytes > _MAX_KEPT_BYTES:
            raise InvalidRequest(
                f"{name} keeps {trial.kept_bytes} bytes of memory when it is compiled, {_MAX_KEPT_BYTES} at most are "
                "accepted"
            )
        if trial.build_s > _MAX_BUILD_S:
            raise InvalidRequest(
                f"{name} takes {trial.build_s:.2f} s to compile, {_MAX_BUILD_S:g} at most are accepted"
            )
        matcher = make_matcher(self._tokenizer, trial.grammar)
        if matcher.is_error():
            raise InvalidRequest(f"the {guide.type} guide is malformed: {_error_of(matcher)}")
        first = matcher.deep_copy()
        compiled = CompiledGuide(matcher, _next_tokens(first), first.is_accepting(), trial.kept_bytes, trial.copy_bytes)
        return compiled, time.thread_time() - started_s

    def _mask(self, token_ids: tuple[int, ...] | list[int]) -> NDArray[np.int32]:
        return _bitmask([i for i in token_ids if i < self._vocab_size], self._vocab_size)


class _Recent(Generic[_Value]):
    """What is known of the guides of the last requests, up to so many bytes. One is kept however large it is."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._values: OrderedDict[Guide, tuple[_Value, int]] = OrderedDict()

    def get(self, guide: Guide) -> _Value | None:
        if guide not in self._values:
            return None
        self._values.move_to_end(guide)
        return self._values[guide][0]

    def put(self, guide: Guide, value: _Value, num_bytes: int) -> None:
        """num_bytes: that the value takes; each counts 1 KiB at least."""
        self._num_bytes -= self._values.pop(guide, (value, 0))[1]
        self._values[guide] = (value, max(num_bytes, 1024))
        self._num_bytes += max(num_bytes, 1024)
        while len(self._values) > 1 and self._num_bytes > self._max_bytes:
            self._num_bytes -= self._values.popitem(last=False)[1][1]


def _make_builder() -> ThreadPoolExecutor:
    """One thread of the least priority, with a large stack."""
    builder = ThreadPoolExecutor(1, "guide-builder")
    previous = threading.stack_size(_STACK_BYTES)
    try:
        # A step's threads sleep and wake hundreds of times. One that wakes takes its core from a thread of this class
        # at once; from a thread that is only nice, after milliseconds.
        builder.submit(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)).result()
    finally:
        threading.stack_size(previous)
    return builder


def _token_table(tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
    """vocab_size: of the model, which may be padded beyond the tokenizer's."""
    num_tokens = max(vocab_size, tokenizer.vocab_size)
    return TokenTable(
        [tokenizer.spell(token_id) for token_id in range(num_tokens)],
        sorted(tokenizer.special_ids),
        tokenizer.eos_id or 0,
    )


def _next_tokens(matcher: LLMatcher) -> NDArray[np.int32]:
    """Bitmask of the tokens that may come next. Raises InvalidRequest."""
    allowed = np.frombuffer(matcher.compute_bitmask(), np.int32)
    if matcher.is_error():
        raise InvalidRequest(f"the guide has no answer from here: {_error_of(matcher)}")
    return allowed


def _error_of(matcher: LLMatcher) -> str:
    return one_line(matcher.get_error(), _MAX_ERROR_CHARS)


def _bitmask(token_ids: list[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _contains(bitmask: NDArray[np.int32], token_id: int) -> bool:
    return bool(bitmask[token_id // 32] >> (token_id % 32) & 1)
