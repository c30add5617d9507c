"""Guided decoding: answers that always parse. After every token, a grammar says which tokens may follow.

llguidance does the work of the grammars. This file applies its masks, decides when an end token is allowed, and keeps
compiled guides.
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
from multilora_engine.guides.thinking import Thinking
from multilora_engine.log_lines import one_line
from multilora_engine.request import Guide
from multilora_engine.text.tokenizer import Tokenizer

_MAX_KEPT_BYTES = 40 << 20
"""The most memory that one compiled guide may keep. 700 integers with bounds, in 64 kB, keep 36 MB."""

_MAX_CACHED_BYTES = 48 << 20
"""The most memory of the compiled guides that are kept for later requests, each with its lexer at its largest."""

_MAX_TRIALS_BYTES = 4 << 20
"""The most bytes of guides and grammars that passed a trial and are remembered, so that they need no other trial."""

_MAX_REFUSED_BYTES = 1 << 20
"""The most bytes of refused guides that are remembered, so that they are refused again without a trial."""

_REFUSED_S = 60.0
"""How long a refused guide is remembered. It may have exceeded a limit only because the machine was slow."""

_MAX_TOKENS_OF_A_LEXER = 20_000
"""After this many tokens a guide gets a new lexer. A lexer grows with the tokens of all answers that it guides, and at
its limit it ends them."""

_MAX_BUILD_S = 1.0
"""The most CPU seconds for which the engine compiles a guide. A legal guide of 64 kB takes 0.4 s."""

_STACK_BYTES = 64 << 20
"""The stack of the thread that compiles: several times the sandbox's. The system gives memory only as it is used."""

_MAX_ERROR_CHARS = 500

_Value = TypeVar("_Value")


@dataclass(eq=False)
class CompiledGuide:
    """A compiled guide, at the start of its grammar.

    allowed: bitmask of the tokens that may come first by the grammar.
    may_end: whether an empty answer parses.
    kept_bytes: the memory that the guide keeps.
    copy_bytes: the further memory of each `GuideMatcher`.
    num_tokens: the number of tokens that the guide has guided.
    """

    matcher: LLMatcher
    allowed: NDArray[np.int32]
    may_end: bool
    kept_bytes: int
    copy_bytes: int
    num_tokens: int = 0

    @property
    def is_worn(self) -> bool:
        """Whether later answers need a new lexer."""
        return self.num_tokens >= _MAX_TOKENS_OF_A_LEXER


class GuideMatcher:
    """The place of one sequence's answer in its grammar.

    compiled: the guide. The matchers of all its answers share it.
    allowed: the tokens that may come next, int32 [ceil(vocab / 32)]; bit i of word w is token 32 w + i. End tokens are
    among them if the answer parses as it is.
    """

    allowed: NDArray[np.int32]

    def __init__(self, compiled: CompiledGuide, text_tokens: NDArray[np.int32], end_tokens: NDArray[np.int32]) -> None:
        """text_tokens, end_tokens: bitmasks of the tokens that mean text, and of the tokens that end this sequence.

        Raises InvalidRequest if the grammar allows only the empty answer.
        """
        self.compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._text_tokens = text_tokens & ~end_tokens
        self._end_tokens = end_tokens
        self._thinking: Thinking | None = None
        # The first mask comes with the guide: to compute it here would hold up the guide's other answers.
        if self._allow(compiled.allowed, compiled.may_end):
            raise InvalidRequest("the guide allows nothing but an empty answer")

    def let_think(self, thinking: Thinking) -> None:
        """Let the model think before the guided text. Called before the first token."""
        self._thinking = thinking
        self._guided = self.allowed
        if thinking.has_begun:
            self.allowed = self._thought_tokens(thinking)
        elif thinking.begin_id is not None:
            self.allowed = self.allowed | self._mask_of(thinking.begin_id)

    @property
    def num_bytes(self) -> int:
        """The memory of this matcher, without the memory that `compiled` keeps."""
        return self.compiled.copy_bytes + self.allowed.nbytes

    def advance(self, token_id: int) -> bool:
        """Take the chosen token. Returns whether the answer is complete: it parses, and no text can follow.

        Raises InvalidRequest if the grammar exceeds a limit. The sequence ends then.
        """
        assert _contains(self.allowed, token_id), f"token {token_id} is against the guide"
        if self._thinking is not None and self._think(self._thinking, token_id):
            return False
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

    def _think(self, thinking: Thinking, token_id: int) -> bool:
        """Take a token before the guided text. Returns whether it belongs to the thinking."""
        if not thinking.has_begun:
            if token_id != thinking.begin_id:
                self._thinking = None
                return False
            thinking.has_begun = True
            self.allowed = self._thought_tokens(thinking)
        elif thinking.is_ended_by(token_id):
            self._thinking = None
            self.allowed = self._guided
        return True

    def _thought_tokens(self, thinking: Thinking) -> NDArray[np.int32]:
        """The tokens of thinking: any text, and the mark at its end, but no token that ends the answer."""
        marked = 0 if thinking.end_id is None else self._mask_of(thinking.end_id)
        return self._text_tokens | marked

    def _mask_of(self, token_id: int) -> NDArray[np.int32]:
        return _bitmask([token_id], 32 * len(self._text_tokens))

    def _allow(self, allowed: NDArray[np.int32], may_end: bool) -> bool:
        """Note the tokens that may come next. Returns whether no text token may."""
        self.allowed = allowed[: len(self._text_tokens)] & self._text_tokens
        has_next = bool(self.allowed.any())
        if not has_next and not may_end:
            raise InvalidRequest("the guide wants text that no token of this model spells")
        if may_end:
            self.allowed |= self._end_tokens
        return not has_next


class _SpelledTokens(LongestFirst):
    """Our tokenizer in the form that llguidance takes.

    llguidance could read tokenizer.json itself. But then two programs would decide what text a token stands for.
    """

    def __init__(self, tokenizer: Tokenizer, table: TokenTable) -> None:
        super().__init__(table)
        self._tokenizer = tokenizer

    def _spell(self, text: str) -> list[int]:
        """The tokenizer's own tokens, as in the model's training. If their text differs, the longest tokens that fit:
        sentencepiece tokenizers put a space in front.
        """
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(map(self._tokenizer.token_bytes, token_ids))
        return token_ids if spelled == text.encode() else super()._spell(text)


class GuideCompiler:
    """Compiles guides for one tokenizer and a model with logits of `vocab_size`. Several threads may use it.

    The sandbox compiles each new guide first. If it survives, one thread of the engine's process compiles it again.
    This thread runs only when a core has nothing else to do, such as in the pauses of a step. There is only one such
    thread because the C library keeps the memory that each thread took while it compiled.
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
        """Start the sandbox, so that the first guide need not wait for it. Raises OSError."""
        self._sandbox.start()

    def close(self) -> None:
        """End the sandbox. The thread that compiles ends after its present guide."""
        self._sandbox.close()
        self._builder.shutdown(cancel_futures=True)

    def matcher(self, guide: Guide, end_tokens: tuple[int, ...], watch: GuideWatch | None = None) -> GuideMatcher:
        """A matcher at the start of the answer.

        Raises InvalidRequest if the guide is malformed or exceeds a limit, Unavailable if the sandbox is broken, and
        Cancelled if nobody wants the guide any more.
        """
        compiled = self._known(guide) or self._compile(guide, watch or GuideWatch())
        return GuideMatcher(compiled, self._text_tokens, self._mask(end_tokens))

    def _known(self, guide: Guide) -> CompiledGuide | None:
        """The compiled guide, if there is one. Raises InvalidRequest if the guide was refused a moment ago."""
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
        """The compiled guide, and the CPU seconds that it took to compile."""
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
    """A value for each of the most recent guides, up to `max_bytes`. The latest value is kept whatever its size."""

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
        """num_bytes: the size of the value. Each value counts at least 1 KiB."""
        self._num_bytes -= self._values.pop(guide, (value, 0))[1]
        self._values[guide] = (value, max(num_bytes, 1024))
        self._num_bytes += max(num_bytes, 1024)
        while len(self._values) > 1 and self._num_bytes > self._max_bytes:
            self._num_bytes -= self._values.popitem(last=False)[1][1]


def _make_builder() -> ThreadPoolExecutor:
    """One thread of the lowest priority, with a large stack."""
    builder = ThreadPoolExecutor(1, "guide-builder")
    previous = threading.stack_size(_STACK_BYTES)
    try:
        # A step's threads sleep and wake hundreds of times. A thread that wakes takes its core from an idle-class
        # thread at once. From a thread that is only nice, it would take the core after milliseconds.
        builder.submit(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)).result()
    finally:
        threading.stack_size(previous)
    return builder


def _token_table(tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
    """vocab_size: the model's. It may be larger than the tokenizer's, by padding."""
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
