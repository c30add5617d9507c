"""Reads a checkpoint's tokenizer: by the `tokenizers` library where tokenizer.json says all, else by transformers.

Importing transformers takes a second of CPU and 30 MB that stay, and its tokenizers keep 12 MB more. An engine makes
tokens and bytes only, so it need not have it; chats are rendered by transformers, which is imported for the first one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizerBackend

from multilora_engine.errors import ConfigError
from multilora_engine.text.token_table import byte_level_bytes
from multilora_wire.adapter_use import NAMED_TOKENS
from multilora_wire.checkpoint_directory import is_gguf

if TYPE_CHECKING:
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

_IMPORTING = threading.Lock()

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes in tokenizer_config.json (until transformers 5, and since) that take the tokenizer from tokenizer.json."""

_PLAIN_MODEL_TYPES = ("llama", "qwen3")
"""For other types transformers knows checkpoints that name the wrong class, and takes the model type's own."""

_KEYS_WITHOUT_EFFECT = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "backend",
        "clean_up_tokenization_spaces",
        "is_local",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    }
)
"""Of tokenizer_config.json, for a plain class: what tokenizer.json says counts, or nothing here asks for it."""

_KEYS_READ = frozenset({*NAMED_TOKENS, "added_tokens_decoder", "additional_special_tokens", "chat_template"})

_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Of old checkpoints: read only where tokenizer_config.json has no added tokens."""

DEFAULT_TEMPLATE = "default"
"""transformers' name of the template for all chats that no other one is for."""

_CHAT_TEMPLATE = "chat_template.jinja"
_CHAT_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as its files have it.

    encode: text, and whether special tokens are added, to token ids. templates: the chat templates by their names, of
    which `default` is the one of chats without tools. named_tokens: the tokens that templates write by names.
    load_chats: the tokenizer of transformers that renders chats; it may know no tokens but the special ones.
    """

    backend: TokenizerBackend
    eos_id: int | None
    pad_id: int | None
    encode: Callable[[str, bool], list[int]]
    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    load_chats: Callable[[], PreTrainedTokenizerFast]

    @property
    def has_chats(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.templates)


def fast_tokenizer_class() -> type[PreTrainedTokenizerFast]:
    """transformers' class of fast tokenizers. Any thread may ask: the package itself fails while another imports it."""
    with _IMPORTING:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Raises ConfigError when there is no fast tokenizer."""
    try:
        return (_read_plain(path) if _is_plain(path) else None) or _read_by_transformers(path)
    except ConfigError:
        raise
    except Exception as error:  # its readers raise many types, all of them about the files of this directory
        raise ConfigError(f"cannot load a tokenizer from {path}: {error}") from error


def _is_plain(path: Path) -> bool:
    """Whether the files name a class that takes the tokenizer from tokenizer.json: none need be looked for."""
    if not (path / "tokenizer.json").exists():
        return False
    tokenizer_config, config = (_read_json(path / name) for name in ("tokenizer_config.json", "config.json"))
    return (
        tokenizer_config.get("tokenizer_class") in _PLAIN_CLASSES
        and "auto_map" not in tokenizer_config
        and (is_gguf(path) or config.get("model_type", _PLAIN_MODEL_TYPES[0]) in _PLAIN_MODEL_TYPES)
    )


def _read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is not there."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _read_plain(path: Path) -> TokenizerFiles | None:
    """None where other files than tokenizer.json have a say, which is left to transformers."""
    config = _read_json(path / "tokenizer_config.json")
    if not config.keys() <= _KEYS_WITHOUT_EFFECT | _KEYS_READ or (path / _CHAT_TEMPLATES).exists():
        return None
    if "added_tokens_decoder" not in config and any((path / name).exists() for name in _OTHER_FILES):
        return None
    backend = TokenizerBackend.from_file(str(path / "tokenizer.json"))
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    template_file = path / _CHAT_TEMPLATE
    template = template_file.read_text(encoding="utf-8") if template_file.exists() else config.get("chat_template")
    if backend.padding is not None or not _has_tokens(backend, config, named) or isinstance(template, list):
        return None
    return TokenizerFiles(
        backend,
        backend.token_to_id(named["eos_token"]) if "eos_token" in named else None,
        backend.token_to_id(named["pad_token"]) if "pad_token" in named else None,
        partial(_encode, backend),
        _templates_of(template),
        named,
        partial(load_bare_chats, _templates_of(template), named),
    )


def _encode(backend: TokenizerBackend, text: str, add_special_tokens: bool) -> list[int]:
    # Unlike `encode`, which keeps all other threads from Python for as long as it takes: seconds for a few MB.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _has_tokens(backend: TokenizerBackend, config: Mapping[str, Any], named: Mapping[str, Any]) -> bool:
    """Whether the backend has all special and added tokens of tokenizer_config.json as they are there."""
    added = backend.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    wanted = [*named.values(), *(config.get("additional_special_tokens") or ())]
    decoder = config.get("added_tokens_decoder") or {}
    return all(token in special for token in wanted) and all(
        int(token_id) in added and token == _attributes(added[int(token_id)]) for token_id, token in decoder.items()
    )


def _attributes(token: Any) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def load_bare_chats(templates: Mapping[str, str], named: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer that renders chats by `templates`, and knows no tokens but the named ones."""
    # Rendering asks for the template and the special tokens' names: the tokens need not lie in memory twice.
    no_tokens = TokenizerBackend(models.BPE())
    return fast_tokenizer_class()(tokenizer_object=no_tokens, chat_template=dict(templates) or None, **named)


def _templates_of(template: str | Mapping[str, str] | None) -> Mapping[str, str]:
    if template is None:
        return {}
    return {DEFAULT_TEMPLATE: template} if isinstance(template, str) else dict(template)


def _read_by_transformers(path: Path) -> TokenizerFiles:
    tokenizer = _load_plain(path) if _is_plain(path) else _load_by_class(path)
    if type(tokenizer).__name__ == "ByT5Tokenizer":
        tokenizer = _of_bytes(tokenizer)
    if not isinstance(tokenizer, fast_tokenizer_class()):
        raise ConfigError(f"{path} has no fast tokenizer; add its tokenizer.json")
    return TokenizerFiles(
        tokenizer.backend_tokenizer,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        lambda text, add_special_tokens: list(
            tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        ),
        _templates_of(tokenizer.chat_template),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)},
        lambda: tokenizer,
    )


def _of_bytes(tokenizer: ByT5Tokenizer) -> PreTrainedTokenizerFast:
    """ByT5's tokenizer, which transformers has in Python alone: the special tokens come before the 256 bytes."""
    added: Mapping[int, AddedToken] = tokenizer.added_tokens_decoder
    ids = {char: tokenizer.offset + byte_level_bytes(char)[0] for char in pre_tokenizers.ByteLevel.alphabet()}
    backend = TokenizerBackend(models.BPE({**ids, **{str(token): i for i, token in added.items()}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([added[i] for i in sorted(added)])
    end = (str(tokenizer.eos_token), tokenizer.eos_token_id)
    backend.post_processor = processors.TemplateProcessing(f"$A {end[0]}", f"$A {end[0]} $B {end[0]}", [end])
    names = {name: str(getattr(tokenizer, name)) for name in ("eos_token", "pad_token", "unk_token")}
    return fast_tokenizer_class()(tokenizer_object=backend, chat_template=tokenizer.chat_template, **names)


def _load_plain(path: Path) -> Any:
    return fast_tokenizer_class().from_pretrained(path, local_files_only=True)


def _load_by_class(path: Path) -> Any:
    # Looking for the class imports torch, its compiler and much of transformers: seconds of CPU, and 100 MB that stay.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
