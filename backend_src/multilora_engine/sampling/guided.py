"""Guided decoding: answers that always parse. A grammar says after every token which tokens may follow.

The grammars themselves are llguidance's work; here are its limits, its masks and the meaning of an end token to them.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from numpy.typing import NDArray

from multilora_engine.errors import InvalidRequest
from multilora_engine.request import Guide
from multilora_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GUIDE_BYTES = 65_536
"""A grammar of this size takes up to half a second to compile, and 40 MB."""

_MAX_LEXER_STATES = 20_000
"""The most states of one guide, of 1 to 2 kB each. A regular expression can have exponentially many."""

_MAX_STEP_LEXER_FUEL = 100_000
"""The most work of the lexer for one mask: some 7 ms, for which the engine's thread waits."""

_MAX_CACHED_BYTES = 8 * MAX_GUIDE_BYTES
"""The most bytes of guides kept compiled for further requests, each counting at least `_MIN_CACHED_BYTES`."""

_MIN_CACHED_BYTES = 1024

_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Unlimited white space is legal JSON, and a model that is lost writes it until `max_tokens`."""

_LARGEST_NUMBER = 2**53
"""Of a JSON schema, as in I-JSON (RFC 7493): llguidance rounds larger bounds in silence, and one near -2^63 ends the
process."""

_NESTED_SCHEMA = "%json"
"""Of Lark grammars."""

_INTEGER = re.compile(r"-?[0-9]{1,100}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?")

_ANY_JSON = json.dumps({"type": ["object", "array"]})


class GuideMatcher:
    """The place of one sequence's answer in its grammar.

    allowed: int32 [ceil(vocab / 32)], bit i of word w is token 32 w + i: the tokens that may come next. An end token
        may when the answer parses as it is.
    """

    def __init__(self, matcher: LLMatcher, text_tokens: NDArray[np.int32], end_tokens: NDArray[np.int32]) -> None:
        """matcher: at the start of its grammar. text_tokens, end_tokens: bitmasks of the tokens that mean text, and of
        the tokens that end this sequence. Raises InvalidRequest when the grammar allows no answer with a token."""
        self._matcher = matcher
        self._text_tokens = text_tokens & ~end_tokens
        self._end_tokens = end_tokens
        if self._look_ahead():
            raise InvalidRequest("the guide allows nothing but an empty answer")

    def advance(self, token_id: int) -> bool:
        """Take the token that was chosen; whether the answer is complete: it parses, and no text can follow.

        Raises InvalidRequest when the answer cannot go on, which ends the sequence: the grammar exceeded a limit.
        """
        assert _contains(self.allowed, token_id), f"token {token_id} is against the guide"
        if _contains(self._end_tokens, token_id):
            return True
        self._matcher.consume_token(token_id)
        return self._look_ahead()

    def _look_ahead(self) -> bool:
        """Find the tokens that may come next; whether there are none."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._text_tokens)]
        if self._matcher.is_error():
            raise InvalidRequest(f"the guide has no answer from here: {self._matcher.get_error()}")
        self.allowed = words & self._text_tokens
        has_next, may_end = bool(self.allowed.any()), self._matcher.is_accepting()
        if not has_next and not may_end:
            raise InvalidRequest("the guide wants text that no token of this model spells")
        if may_end:
            self.allowed |= self._end_tokens
        return not has_next


class _TokenTable:
    """Our tokenizer as llguidance wants one. It could read tokenizer.json itself, but then the text that it checks and
    the text that clients get would have two authors."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: of the model, which may be padded beyond the tokenizer's."""
        self._tokenizer = tokenizer
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(max(vocab_size, tokenizer.vocab_size))]
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        self._longest = max(map(len, self._ids))
        for token_id in self.special_token_ids:
            self.tokens[token_id] = tokenizer.token_name(token_id).encode()
        self.eos_token_id = tokenizer.eos_id or 0
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """The tokens of text that a grammar forces. The tokenizer's own spell it as the model was trained to see
        it, unless it puts a space in front, as sentencepiece ones do; then the longest that fit, one after the other.
        """
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(map(self._tokenizer.token_bytes, token_ids))
        return token_ids if spelled == text.encode() else self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        while text:
            fitting = (n for n in range(min(len(text), self._longest), 0, -1) if text[:n] in self._ids)
            length = next(fitting, None)
            if length is None:
                break
            token_ids.append(self._ids[text[:length]])
            text = text[length:]
        return token_ids


class GuideCompiler:
    """Guides to matchers, for one tokenizer and a model whose logits are `vocab_size` wide."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        table = _TokenTable(tokenizer, vocab_size)
        self._tokenizer = LLTokenizer(TokenizerWrapper(table))
        with_text = [token_id for token_id in range(vocab_size) if tokenizer.token_bytes(token_id)]
        self._text_tokens = self._mask(with_text) & ~self._mask([table.eos_token_id])
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    def matcher(self, guide: Guide, end_tokens: tuple[int, ...]) -> GuideMatcher:
        """A matcher at the start of the answer. Raises InvalidRequest for a guide that is malformed."""
        return GuideMatcher(self._compile(guide).deep_copy(), self._text_tokens, self._mask(end_tokens))

    def _compile(self, guide: Guide) -> LLMatcher:
        if guide not in self._compiled:
            self._compiled[guide] = self._compile_new(guide)
        self._compiled.move_to_end(guide)
        while len(self._compiled) > 1 and sum(map(_cached_bytes, self._compiled)) > _MAX_CACHED_BYTES:
            self._compiled.popitem(last=False)
        return self._compiled[guide]

    def _compile_new(self, guide: Guide) -> LLMatcher:
        try:
            grammar = _grammar(guide)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the {guide.type} guide is malformed: {error}") from None
        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, step_lexer_fuel=_MAX_STEP_LEXER_FUEL, verbose_errors=False
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"the {guide.type} guide is malformed: {matcher.get_error()}")
        return matcher

    def _mask(self, token_ids: tuple[int, ...] | list[int]) -> NDArray[np.int32]:
        return _bitmask([i for i in token_ids if i < self._vocab_size], self._vocab_size)


def _cached_bytes(guide: Guide) -> int:
    return max(guide.num_bytes, _MIN_CACHED_BYTES)


def _grammar(guide: Guide) -> str:
    """llguidance's own form of a guide. Raises ValueError for some malformed ones."""
    match guide.type:
        case "json":
            return LLMatcher.grammar_from_json_schema(_ANY_JSON, defaults=_JSON_OPTIONS)
        case "json_schema":
            json.loads(guide.text, parse_int=_checked, parse_float=_checked)
            return LLMatcher.grammar_from_json_schema(guide.text, defaults=_JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(guide.text)
        case "ebnf_grammar":
            if _NESTED_SCHEMA in guide.text:
                for number in _NUMBER.findall(guide.text):
                    _checked(number)
            return grammar_from("ebnf", guide.text)


def _checked(number: str) -> float:
    """Raises ValueError for a number beyond those that grammars are made of."""
    value = int(number) if _INTEGER.fullmatch(number) else float(number)
    if abs(value) > _LARGEST_NUMBER:
        raise ValueError(f"{number[:40]} is beyond 2^53, the largest number of a JSON schema")
    return value


def _bitmask(token_ids: list[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _contains(bitmask: NDArray[np.int32], token_id: int) -> bool:
    return bool(bitmask[token_id // 32] >> (token_id % 32) & 1)
