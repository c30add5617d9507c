"""Makes a grammar in llguidance's own form of a guide's text, and a matcher of the grammar, within limits.

The sandbox process imports this file. So this file imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from multilora_engine.request import Guide

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GUIDE_BYTES = 65_536
"""The largest guide. It takes up to half a second to compile, 54 MB meanwhile, and 36 MB afterwards."""

MAX_LEXER_BYTES = 4 << 20
"""The most memory that the lexer of one guide takes while tokens are chosen: `_MAX_LEXER_STATES`, each of 0.9 kB at
most, as measured."""

_MAX_LEXER_STATES = 4_000
"""The number of states of a regular expression can be exponential. 40,000 tokens of a calculator's grammar take 3,500
states."""

_MAX_STEP_LEXER_FUEL = 100_000
"""The most work of the lexer for one mask. It takes some 7 ms, and the engine's thread waits for it."""

_MAX_STEP_ITEMS = 12_500
"""The most work of the parser for one mask. The time grows with the square of this number: up to 13 ms, against 112 ms
with the library's own limit of 50,000. An object of 490 optional properties, each with a choice of types, needs a third
of this number."""

_FORCED_CHARS = 512
"""The number of characters that are tokenized for one mask, of a text that the grammar forces. A mask needs only the
first token. Tokenizing the whole text, 60 kB at most, took 80 ms for each token."""

_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Unlimited white space is legal JSON. A model that has lost its way writes white space until `max_tokens`."""

_LARGEST_NUMBER = 2**53
"""The largest number of a JSON schema, as in I-JSON (RFC 7493). llguidance rounds larger bounds silently, and a bound
near -2^63 ends the process."""

_NESTED_SCHEMA = "%json"
"""The word that begins a JSON schema inside a Lark grammar."""

_INTEGER = re.compile(r"-?[0-9]{1,100}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?")

_ANY_JSON = json.dumps({"type": ["object", "array"]})


class TokenTable(msgspec.Struct):
    """A vocabulary in the form that llguidance takes.

    tokens: for each token id the token's bytes, or the name of a special token.
    bos_token_id: unused, but llguidance asks for the attribute.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def tokenizer(self) -> LLTokenizer:
        """A tokenizer for text that a grammar forces. It always takes the longest token that fits next."""
        return make_tokenizer(LongestFirst(self))


class LongestFirst:
    """Tokenizes the beginning of a text. It always takes the longest token that fits next."""

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.special_token_ids = table.special_token_ids
        self.eos_token_id = table.eos_token_id
        self.bos_token_id = table.bos_token_id
        special = set(table.special_token_ids)
        self._ids = {text: i for i, text in enumerate(table.tokens) if text and i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens of the first `_FORCED_CHARS` of a text that a grammar forces."""
        return self._spell(text[:_FORCED_CHARS])

    def _spell(self, text: str) -> list[int]:
        rest, token_ids = text.encode(), []
        while rest:
            fitting = (n for n in range(min(len(rest), self._longest), 0, -1) if rest[:n] in self._ids)
            length = next(fitting, None)
            if length is None:
                break
            token_ids.append(self._ids[rest[:length]])
            rest = rest[length:]
        return token_ids


def make_tokenizer(spelling: LongestFirst) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(spelling))


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar. Its `is_error` tells whether the grammar is malformed."""
    limits = LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES,
        step_lexer_fuel=_MAX_STEP_LEXER_FUEL,
        step_max_items=_MAX_STEP_ITEMS,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def grammar_of(guide: Guide) -> str:
    """llguidance's own form of a guide. Raises ValueError or RecursionError for some malformed guides."""
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
    """The value of a number in a schema. Raises ValueError for one beyond `_LARGEST_NUMBER`."""
    value = int(number) if _INTEGER.fullmatch(number) else float(number)
    if abs(value) > _LARGEST_NUMBER:
        raise ValueError(f"{number[:40]} is beyond 2^53, the largest number of a JSON schema")
    return value
