"""The tokenizer of a GGUF file, in Hugging Face's files.

Text is cut as llama.cpp cuts it (`src/llama-vocab.cpp`). Its regular expressions are known here by the name that a file
gives them, `tokenizer.ggml.pre`; a file with another name is refused. Where llama.cpp and the tokenizer of the original
model differ, as in Unicode's normal forms, llama.cpp decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from multilora_engine.errors import ConfigError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens, in `tokenizer.ggml.token_type`."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Cut:
    """How text is cut before its pieces become tokens.

    patterns: each cuts the pieces of the one before. takes_whole_words: whether a piece that is a token becomes that
    one, whatever the merges say. adds_bos: unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False


_CUTS: Mapping[str, _Cut] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _Cut((_LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Cut((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Cut((_QWEN2,))),
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "granite-docling"), _Cut((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Cut((r"\p{N}", _GPT2))),
    "tekken": _Cut((_TEKKEN,), True, True),
    "gpt-4o": _Cut((_GPT4O,)),
}
"""By `tokenizer.ggml.pre`, for byte-level vocabularies."""

_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
    }
)
"""Tokens at which an answer ends, though the file may not name them."""

_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos", "eot", "eom")
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Of files that do not tell: Llama's, as the first converters left them out."""

_WITHOUT_EFFECT = frozenset(
    {
        # Only programs that fill in code ask for these tokens, and only encoders for those after.
        *(f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *(f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle", "mask", "cls", "seperator", "separator")),
        "ggml.token_type_count",
        # The whole tokenizer of the original model, which llama.cpp does not read.
        "huggingface.json",
    }
)

_KEEP_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's special tokens after which spaces stay."""

_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
_DEFAULT_SPACE = "\u2581"


@dataclass(frozen=True)
class TokenizerContent:
    """tokenizer, config: the JSON of tokenizer.json and tokenizer_config.json. templates: chat templates, by their
    names; the default one has the name "". ids: `bos_token_id` and its like, for config.json. end_token_ids: tokens at
    which an answer ends.
    """

    tokenizer: str
    config: Mapping[str, Any]
    templates: Mapping[str, str]
    ids: Mapping[str, int]
    end_token_ids: tuple[int, ...]


def read_gguf_tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> TokenizerContent:
    """The tokenizer that the metadata describe. Raises ConfigError, which names the key."""
    left = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    vocabulary = _read_vocabulary(left, vocab_size)
    model = _pop(left, "ggml.model", str)
    pre = _pop(left, "ggml.pre", str, "default")
    architecture, name = metadata.get("general.architecture"), str(metadata.get("general.name", ""))
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(left, vocabulary, pre)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(left, vocabulary), True
    else:
        raise ConfigError(f"tokenizer.ggml.model {model!r:.80} is not supported; supported are: gpt2, llama")
    strips = model == "llama" and (architecture == "phi3" or "phi-3" in name.lower() or "phi3" in name.lower())
    _add_tokens(tokenizer, vocabulary, strips)
    defaults = _SENTENCEPIECE_IDS if model == "llama" else {}
    ids = {kind: _pop_id(left, kind, vocabulary, defaults.get(kind)) for kind in (*_NAMED, "eot", "eom")}
    adds_bos = _pop(left, "ggml.add_bos_token", bool, adds_bos)
    adds_eos = _pop(left, "ggml.add_eos_token", bool, False)
    _add_ends(tokenizer, vocabulary, ids["bos"] if adds_bos else None, ids["eos"] if adds_eos else None)
    templates = _pop_templates(left)
    for key, value in left.items():
        is_empty = value in (False, [], "") and key in (
            "ggml.add_sep_token",
            "ggml.remove_extra_whitespaces",
            "ggml.precompiled_charsmap",
        )
        if key not in _WITHOUT_EFFECT and not is_empty:
            raise ConfigError(f"tokenizer.{key} {value!r:.80} is not supported: nobody here knows this key")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[i] for kind, name in _NAMED.items() if (i := ids[kind]) is not None},
    }
    for kind in _NAMED:
        if (token_id := ids[kind]) is not None:
            _make_special(tokenizer, vocabulary.tokens[token_id])
    ends = dict.fromkeys(token_id for kind in _ENDS if (token_id := ids[kind]) is not None)
    ends |= dict.fromkeys(sorted(i for text in _END_TEXTS if (i := vocabulary.id_of.get(text)) is not None))
    token_ids = {f"{kind}_token_id": token_id for kind in ("bos", "eos") if (token_id := ids[kind]) is not None}
    if ids["padding"] is not None:
        token_ids["pad_token_id"] = ids["padding"]
    return TokenizerContent(tokenizer.to_str(), config, templates, token_ids, tuple(ends))


@dataclass(frozen=True)
class _Vocabulary:
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float] | None
    id_of: Mapping[str, int] = field(default_factory=dict)


def _read_vocabulary(left: dict[str, Any], vocab_size: int) -> _Vocabulary:
    tokens = _pop(left, "ggml.tokens", list)
    if not tokens or not all(type(token) is str for token in tokens):
        raise ConfigError("tokenizer.ggml.tokens is no list of texts")
    if len(tokens) > vocab_size:
        raise ConfigError(f"tokenizer.ggml.tokens has {len(tokens)} tokens, and the embeddings have {vocab_size} rows")
    id_of = {token: index for index, token in enumerate(tokens)}
    if len(id_of) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if id_of[token] != index)
        raise ConfigError(f"tokenizer.ggml.tokens has {twice!r:.80} twice")
    kinds = _numbers(left, "ggml.token_type", len(tokens)) or [_NORMAL] * len(tokens)
    return _Vocabulary(tokens, kinds, _numbers(left, "ggml.scores", len(tokens)), id_of)


def _numbers(left: dict[str, Any], key: str, count: int) -> list[Any] | None:
    values = _pop(left, key, list, None)
    if values is not None and (len(values) != count or not all(type(value) in (int, float) for value in values)):
        raise ConfigError(f"tokenizer.{key} has {len(values)} values, and {count} numbers are expected")
    return values  # type: ignore[no-any-return]


def _byte_level(left: dict[str, Any], vocabulary: _Vocabulary, pre: str) -> tuple[Tokenizer, bool]:
    if pre not in _CUTS:
        raise ConfigError(f"tokenizer.ggml.pre {pre!r:.80} is not supported; supported are: {', '.join(sorted(_CUTS))}")
    cut = _CUTS[pre]
    lines = _pop(left, "ggml.merges", list)
    merges = [tuple(line.split(" ")) for line in lines if type(line) is str]
    if len(merges) < len(lines) or any(len(merge) != 2 for merge in merges):
        raise ConfigError("tokenizer.ggml.merges is no list of pairs of tokens")
    _pop(left, "ggml.add_space_prefix", bool, False)  # llama.cpp asks for it with a vocabulary of sentencepiece alone.
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=cut.takes_whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.adds_bos


def _sentencepiece(left: dict[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    if vocabulary.scores is None:
        raise ConfigError("tokenizer.ggml.scores is missing")
    left.pop("ggml.merges", None)  # llama.cpp merges by the scores.
    has_prefix = _pop(left, "ggml.add_space_prefix", bool, True)
    unknown = left.get("ggml.unknown_token_id", _SENTENCEPIECE_IDS["unknown"])
    unk_token = vocabulary.tokens[unknown] if type(unknown) is int and 0 <= unknown < len(vocabulary.tokens) else None
    merges = _merges_by_score(vocabulary, vocabulary.scores)
    tokenizer = Tokenizer(_bpe(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    marks = normalizers.Replace(" ", _DEFAULT_SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_DEFAULT_SPACE), marks]) if has_prefix else marks
    steps = [decoders.Replace(_DEFAULT_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that together are a token, those with the highest score of the whole first."""
    known = vocabulary.id_of
    order = sorted(
        (i for i, kind in enumerate(vocabulary.kinds) if kind in (_NORMAL, _UNUSED)), key=lambda i: (-scores[i], i)
    )
    merges = []
    for token in (vocabulary.tokens[i] for i in order):
        merges += [
            (token[:place], token[place:])
            for place in range(1, len(token))
            if token[:place] in known and token[place:] in known
        ]
    return merges


def _bpe(vocabulary: _Vocabulary, merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=dict(vocabulary.id_of), merges=merges, **options)
    except Exception as error:  # The library raises Exception itself.
        raise ConfigError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, strips: bool) -> None:
    """Make the tokens that are found in text as a whole. strips: whether spaces after them go, as in Phi-3."""
    pairs = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    special = [
        AddedToken(token, normalized=False, special=True, rstrip=strips and token not in _KEEP_SPACES)
        for token, kind in pairs
        if kind == _CONTROL or (kind == _UNKNOWN and token)
    ]
    others = [
        AddedToken(token, normalized=False, special=False, rstrip=strips)
        for token, kind in pairs
        if kind == _USER_DEFINED and token
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)


def _make_special(tokenizer: Tokenizer, token: str) -> None:
    """Transformers takes the named tokens for special ones, whatever their types are."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(one.content == token and one.special for one in added):
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, first: int | None, last: int | None) -> None:
    """Make special tokens begin and end every text."""
    ends = [token_id for token_id in (first, last) if token_id is not None]
    if not ends:
        return
    names = {token_id: f"<{token_id}>" for token_id in ends}  # Templates take no token's own name that has a colon.
    single = [*([names[first]] if first is not None else []), "$A", *([names[last]] if last is not None else [])]
    specials = [
        {"id": names[token_id], "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]} for token_id in names
    ]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)


def _pop_templates(left: dict[str, Any]) -> dict[str, str]:
    """The chat templates by their names; "" is the default one."""
    templates: dict[str, str] = {}
    if "chat_template" in left:
        templates[""] = _pop(left, "chat_template", str)
    for name in _pop(left, "chat_templates", list, []):
        if type(name) is not str or not _TEMPLATE_NAME.fullmatch(name):
            raise ConfigError(f"tokenizer.chat_templates has {name!r:.80}, which is no name of a template")
        templates[name] = _pop(left, f"chat_template.{name}", str)
    return templates


def _pop_id(left: dict[str, Any], kind: str, vocabulary: _Vocabulary, default: int | None) -> int | None:
    key = f"ggml.{kind}_token_id"
    token_id = _pop(left, key, int, default)
    if token_id is None or token_id in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= token_id < len(vocabulary.tokens):
        raise ConfigError(f"tokenizer.{key} {token_id} is none of {len(vocabulary.tokens)} tokens")
    return int(token_id)


_MISSING: Any = object()


def _pop(left: dict[str, Any], key: str, kind: type, default: Any = _MISSING) -> Any:
    value = left.pop(key, default)
    if value is _MISSING:
        raise ConfigError(f"tokenizer.{key} is missing")
    if value is not default and type(value) is not kind:
        raise ConfigError(f"tokenizer.{key} is {value!r:.80}, and {kind.__name__} is expected")
    return value


def json_text(values: Mapping[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
