"""Tokens to text and back. Here, and nowhere else, it is decided what the text of a token sequence is.

The text of tokens is the concatenation of their bytes (`Tokenizer.token_bytes`), decoded as UTF-8 with every invalid
piece replaced by U+FFFD. So text does not depend on how a stream was cut. For byte-level tokenizers this is what
transformers decodes; sentencepiece ones differ in one way: transformers drops the first space of whatever it decodes,
we keep it, because a continuation starts with a space whenever the model meant one.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers import Tokenizer as TokenizerBackend
from transformers import PreTrainedTokenizerFast

from multilora_engine.errors import ConfigError, InvalidRequest
from multilora_engine.text.automaton import ROOT, Automaton
from multilora_engine.text.plain_specials import PlainSpecials

_SPACE_MARK = "▁"
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""What tokenizer_config.json names (until transformers 5, and since) where tokenizer.json alone is the tokenizer."""

_PLAIN_MODEL_TYPES = ("llama", "qwen3")
"""For others transformers knows checkpoints that name the wrong class, and takes the model type's own."""


class Tokenizer:
    """The tokenizer of a checkpoint directory: text and chats to token ids, token ids to bytes and text.

    Raises ConfigError at construction when there is no fast tokenizer, or one whose decoder is neither byte-level nor
    sentencepiece style (`▁` for a space, optionally `<0xNN>` for a byte).
    """

    def __init__(self, path: Path) -> None:
        self._hf = _load(path)
        # A checkpoint may store that prompts are cut or filled up; transformers undoes it in its own calls only.
        self._hf.backend_tokenizer.no_truncation()
        self._hf.backend_tokenizer.no_padding()
        self._bytes = _token_table(self._hf.backend_tokenizer)
        self.special_ids = frozenset(_special_ids(self._hf.backend_tokenizer))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's own vocabulary may be padded beyond it."""
        return len(self._bytes)

    @property
    def eos_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def pad_id(self) -> int | None:
        token_id: int | None = self._hf.pad_token_id
        return token_id

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt; `add_special_tokens` adds those of the tokenizer's post-processor, such as BOS."""
        try:
            ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the prompt is not valid Unicode text: {error}") from error
        return ids

    def encode_words(self, words: list[str]) -> list[list[int]]:
        """Token ids of each of many words as they stand, in a quarter of the time that `encode` takes for them."""
        encodings = self._hf.backend_tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        keeps_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer.

        options: `add_generation_prompt`, `continue_final_message` and what the template knows by other names.
        keeps_special_tokens: whether what spells a special token in messages, tools and options becomes one.
        Raises InvalidRequest when the template refuses it, or would leave the tools out without a word.
        """
        if self._hf.chat_template is None:
            raise InvalidRequest("this model has no chat template; send text_input instead of messages")
        _check_messages(messages)
        plain = PlainSpecials(() if keeps_special_tokens else map(self.token_name, self.special_ids))
        messages, tools, options = (plain.mark(each) for each in (messages, tools, options))
        options = {"add_generation_prompt": True, **options}
        text = self._render_chat(messages, tools, options)
        if tools and text == self._render_chat(messages, None, options):
            raise InvalidRequest("the model's chat template has no place for tools")
        pieces = (self.encode(piece, add_special_tokens=False) for piece in plain.pieces(text))
        return [token_id for piece in pieces for token_id in piece]

    def _render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                **options,
            )
        except Exception as error:  # templates are programs: what they raise on input they do not like is up to them
            raise InvalidRequest(f"the model's chat template refused the messages: {error}") from error
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for, often only part of a character. Special and unknown ids have none."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def spell(self, token_id: int) -> bytes:
        """`token_bytes`, but special tokens by their names."""
        return self.token_name(token_id).encode() if token_id in self.special_ids else self.token_bytes(token_id)

    def token_name(self, token_id: int) -> str:
        """How the vocabulary spells a token."""
        return str(self._hf.convert_ids_to_tokens(token_id))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens: their bytes joined, invalid UTF-8 replaced by U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")


class TextDelta(msgspec.Struct, frozen=True):
    """What one more token decided. `stopped`: a stop word was completed, and nothing may follow."""

    token_ids: list[int]
    text: str
    stopped: bool = False


class TextStream:
    """The text of one sequence, token by token, without ever taking back a character.

    Held back until decided: the bytes of an incomplete UTF-8 character, and the longest end of the text that could
    still become a stop word, or is that of tokens that could still become a stop token sequence. Tokens are released
    when all their text is, and only up to one that ends at a character boundary, so decoding each delta's tokens on
    their own gives the same text as decoding all of them together.

    The stop word that ends first wins; of those that end at the same character, the longest. A stop token sequence that
    the same token completes wins if it begins earlier. Text up to its start is emitted, and with it all tokens up to
    and including the one that completed it. With `include_stop_str_in_output` text up to its end is emitted, and since
    that holds for every stop, none has text held back.

    Over the whole stream the texts add up to `Tokenizer.decode` of all tokens, cut at that stop word.
    Raises InvalidRequest for an empty stop word or stop token sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: tuple[str, ...] = (),
        stop_token_sequences: tuple[tuple[int, ...], ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        if not all(stop_words):
            raise InvalidRequest("a stop word is empty")
        if not all(stop_token_sequences):
            raise InvalidRequest("stop_words_list has a sequence without tokens")
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._words = Automaton(stop_words)
        self._word_state = ROOT
        self._sequences = Automaton(stop_token_sequences)
        self._sequence_state = ROOT
        self._can_stop = bool(stop_words or stop_token_sequences)
        self._includes_stop = include_stop_str_in_output
        self._token_starts: deque[int] = deque(maxlen=max(map(len, stop_token_sequences), default=0))
        self._held_text = ""
        self._num_emitted = 0
        self._held_tokens: deque[tuple[int, list[int]]] = deque()
        self._open_tokens: list[int] = []
        self._is_stopped = False

    def fork(self) -> TextStream:
        """A stream of its own that goes on from here, at a price that does not depend on how many stops there are."""
        fork = copy.copy(self)
        fork._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        fork._utf8.setstate(self._utf8.getstate())
        fork._token_starts = self._token_starts.copy()
        fork._held_tokens = self._held_tokens.copy()
        fork._open_tokens = self._open_tokens.copy()
        return fork

    def push(self, token_id: int) -> TextDelta:
        """Add the next token; what is decided by it. Not after a delta with `stopped`."""
        assert not self._is_stopped, "a token after the stop word"
        if not self._can_stop and not self._open_tokens:
            return self._push_alone(token_id)
        self._open_tokens.append(token_id)
        # How many characters of the whole text precede this token.
        self._token_starts.append(self._num_emitted + len(self._held_text))
        self._sequence_state = self._sequences.step(self._sequence_state, token_id)
        length = self._sequences.longest_word(self._sequence_state)
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return self._add(text, self._stop_of_tokens(length, text) if length else None)

    def _push_alone(self, token_id: int) -> TextDelta:
        """`push` where nothing is held back and nothing can stop: the usual case, and it is asked for every token."""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._num_emitted += len(text)
        if self._utf8.getstate()[0]:
            self._open_tokens.append(token_id)
            return TextDelta([], text)
        return TextDelta([token_id], text)

    def finish(self) -> TextDelta:
        """Everything still held back, when no token follows; an incomplete character becomes U+FFFD."""
        assert not self._is_stopped, "finish after the stop word"
        delta = self._add(self._utf8.decode(b"", final=True))
        if delta.stopped:
            return delta
        return TextDelta(delta.token_ids + self._all_tokens(), delta.text + self._emit(len(self._held_text)))

    def _add(self, text: str, stop_of_tokens: range | None = None) -> TextDelta:
        """stop_of_tokens: where in the held text plus `text` the stop token sequence is that was just completed."""
        stops = [self._stop_in(text), stop_of_tokens]
        self._held_text += text
        if found := [stop for stop in stops if stop is not None]:
            return self._stop(min(found, key=lambda stop: stop.start))
        self._close_tokens()
        text = self._emit(self._num_decided())
        return TextDelta(self._complete_tokens(), text)

    def _num_decided(self) -> int:
        """How many characters of the held text no stop can cut off any more."""
        if self._includes_stop:
            return len(self._held_text)
        num_decided = len(self._held_text) - self._words.num_matched(self._word_state)
        if num_tokens := self._sequences.num_matched(self._sequence_state):
            num_decided = min(num_decided, self._token_starts[-num_tokens] - self._num_emitted)
        return num_decided

    def _stop_of_tokens(self, num_tokens: int, text: str) -> range:
        """Where the last tokens are in the held text plus `text`, which is the last one's."""
        return range(self._token_starts[-num_tokens] - self._num_emitted, len(self._held_text) + len(text))

    def _stop_in(self, text: str) -> range | None:
        """Where in the held text plus `text` the stop word is that `text` completes, None without one."""
        if not self._words:
            return None
        for end, char in enumerate(text, start=len(self._held_text) + 1):
            self._word_state = self._words.step(self._word_state, char)
            if length := self._words.longest_word(self._word_state):
                return range(end - length, end)
        return None

    def _stop(self, stop: range) -> TextDelta:
        self._is_stopped = True
        return TextDelta(self._all_tokens(), self._emit(stop.stop if self._includes_stop else stop.start), stopped=True)

    def _close_tokens(self) -> None:
        """At a character boundary, note after how many characters of the whole text the open tokens are complete."""
        if self._open_tokens and not self._utf8.getstate()[0]:
            self._held_tokens.append((self._num_emitted + len(self._held_text), self._open_tokens))
            self._open_tokens = []

    def _emit(self, num_chars: int) -> str:
        text, self._held_text = self._held_text[:num_chars], self._held_text[num_chars:]
        self._num_emitted += num_chars
        return text

    def _complete_tokens(self) -> list[int]:
        token_ids: list[int] = []
        while self._held_tokens and self._held_tokens[0][0] <= self._num_emitted:
            token_ids += self._held_tokens.popleft()[1]
        return token_ids

    def _all_tokens(self) -> list[int]:
        token_ids = [i for _, ids in self._held_tokens for i in ids] + self._open_tokens
        self._held_tokens.clear()
        self._open_tokens = []
        return token_ids


def _load(path: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = _read_plain(path) if _is_plain(path) else _read_by_class(path)
    except Exception as error:  # its readers raise many types, all of them about the files of this directory
        raise ConfigError(f"cannot load a tokenizer from {path}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{path} has no fast tokenizer; add its tokenizer.json")
    return tokenizer


def _is_plain(path: Path) -> bool:
    """Whether the files say that tokenizer.json is all of the tokenizer, so that no class need be looked for."""
    if not (path / "tokenizer.json").exists():
        return False
    tokenizer_config, config = (_read_json(path / name) for name in ("tokenizer_config.json", "config.json"))
    return (
        tokenizer_config.get("tokenizer_class") in _PLAIN_CLASSES
        and "auto_map" not in tokenizer_config
        and config.get("model_type", _PLAIN_MODEL_TYPES[0]) in _PLAIN_MODEL_TYPES
    )


def _read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is not there."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _read_plain(path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)


def _read_by_class(path: Path) -> Any:
    # Looking for the class imports torch, its compiler and much of transformers: seconds of CPU, and 100 MB that stay.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f'message {i} must look like {{"role": "user", "content": "..."}}, got {message!r}')


def _special_ids(backend: TokenizerBackend) -> list[int]:
    return [i for i, token in backend.get_added_tokens_decoder().items() if token.special]


def _token_table(backend: TokenizerBackend) -> list[bytes]:
    """token id -> bytes, for every id up to the largest."""
    to_bytes = _byte_level_bytes if _is_byte_level(backend) else _sentencepiece_bytes
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token)
    for token_id in _special_ids(backend):
        table[token_id] = b""
    return table


def _is_byte_level(backend: TokenizerBackend) -> bool:
    """Whether the decoder is byte-level; False is sentencepiece style. Any other raises ConfigError."""
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return True
    replaces = [step for step in steps if step["type"] == "Replace"]
    is_space_mark = all(step["pattern"] == {"String": _SPACE_MARK} and step["content"] == " " for step in replaces)
    marks_space = bool(replaces) or "Metaspace" in kinds
    if marks_space and is_space_mark and kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return False
    raise ConfigError(
        f"tokenizer decoder {[step['type'] for step in steps]} is not supported; supported are ByteLevel, and "
        f"sentencepiece style: Replace {_SPACE_MARK!r} or Metaspace, with ByteFallback, Fuse and Strip"
    )


def _decoder_steps(backend: TokenizerBackend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return [{"type": "none"}]
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE_MARK, " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    """Each character stands for one byte. A token with any other character is an added one and stands for itself."""
    try:
        return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_of_character() -> dict[int, int]:
    """GPT-2's printable alphabet: visible Latin-1 bytes stand for themselves, the 68 others for U+0100 and up.

    A byte value that is not its own character maps beyond Latin-1, so that encoding refuses it.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return dict.fromkeys(hidden, 65533) | {0x100 + i: byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_of_character()
