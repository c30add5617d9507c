"""`token_table`: the bytes that each token of a tokenizer stands for; fewer where a token begins a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as TokenizerBackend

from multilora_engine.errors import ConfigError

_SPACE_MARK = "▁"


def special_ids(backend: TokenizerBackend) -> list[int]:
    return [i for i, token in backend.get_added_tokens_decoder().items() if token.special]


def token_table(backend: TokenizerBackend) -> list[bytes]:
    """token id -> bytes, for every id up to the largest."""
    to_bytes = byte_level_bytes if _is_byte_level(backend) else _sentencepiece_bytes
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token)
    for token_id in special_ids(backend):
        table[token_id] = b""
    return table


def start_of_text(backend: TokenizerBackend) -> Callable[[bytes], bytes]:
    """What remains of the first token of a text: without the space that the tokenizer puts before every text."""
    for step in _decoder_steps(backend):
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return lambda data: data.replace(b" ", b"")
        if step["type"] == "Strip" and step["start"]:
            return lambda data: data.removeprefix(b" ")
    return lambda data: data


def _is_byte_level(backend: TokenizerBackend) -> bool:
    """True for a byte-level decoder, False for one in sentencepiece style. Raises ConfigError for any other."""
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


def byte_level_bytes(token: str) -> bytes:
    """Each character stands for one byte. A token with any other character is an added token and stands for itself."""
    try:
        return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_of_character() -> dict[int, int]:
    """GPT-2's printable alphabet: visible Latin-1 bytes stand for themselves, the 68 others for U+0100 and up.

    The 68 Latin-1 characters outside the alphabet map beyond Latin-1, so that encoding to Latin-1 refuses them.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return dict.fromkeys(hidden, 65533) | {0x100 + i: byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_of_character()
