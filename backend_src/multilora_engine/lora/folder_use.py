"""`UseReader`: reads what an adapter's folder says about its use, by comparison with the base model's own files.

Only what differs from the base model counts: trainers save the base's tokenizer, template and settings beside each
adapter. What no chat is answered otherwise for is passed over; whatever else is not known here is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.tokenizer import Tokenizer
from multilora_engine.text.tokenizer_files import DEFAULT_TEMPLATE
from multilora_wire.adapter_use import (
    ADDED_TOKENS_FILE,
    GENERATION_FILE,
    MAX_TEXT_BYTES,
    NAMED_TOKENS,
    OWN_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOOL_TEMPLATE_FILE,
    AdapterUse,
    UseError,
    read_use_files,
)

_TOOL_TEMPLATE = "tool_use"
"""transformers' name of the template for chats with tools."""

_WITHOUT_EFFECT = frozenset(
    {
        "_commit_hash",
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "max_length",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "return_dict_in_generate",
        "transformers_version",
        "trust_remote_code",
        "use_cache",
    }
)
"""Fields of generation_config.json that choose no token. Each request says how long its answer may be."""

_NEUTRAL: Mapping[str, Any] = {
    "diversity_penalty": 0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "length_penalty": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "typical_p": 1,
}
"""Further fields, with the only value that is taken: transformers writes it where nothing was chosen."""


class _Generation(msgspec.Struct, frozen=True):
    """The fields of generation_config.json that are read."""

    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Fields that count only where tokens are drawn: `do_sample` is not false."""


class _Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """multilora.json. max_tokens: the longest answer to a chat that sets no limit itself."""

    system_prompt: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None


class UseReader:
    """Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, model_path: Path, vocab_size: int) -> None:
        """tokenizer, model_path: the base model's. vocab_size: the model's own, which may be padded."""
        self._tokenizer = tokenizer
        self._model_path = model_path
        self._vocab_size = vocab_size

    def read(self, files: Mapping[str, str], has_token_rows: bool = False) -> str:
        """`AdapterUse.text` of a folder. files: as of `read_use_files`.

        has_token_rows: whether the adapter trains rows of tokens, so that tokens of the model's vocabulary which its
        tokenizer has not may mean something; clients then send them as ids.
        Raises InvalidRequest, which names the file and the field.
        """
        if not files:
            return ""
        try:
            return self._read(files, has_token_rows)
        except UseError as error:
            raise InvalidRequest(str(error)) from None

    def read_folder(self, folder: Path, root: Path, has_token_rows: bool = False) -> str:
        """`read` of the files of a folder below `root`; no link may lead out of there. Raises OSError, too."""

        def check(path: Path) -> None:
            if not path.resolve(strict=True).is_relative_to(root.resolve()) or not path.is_file():
                raise UseError(f"{path.relative_to(folder)} is no file of the source")

        try:
            files = read_use_files(folder, check)
        except UseError as error:
            raise InvalidRequest(str(error)) from None
        return self.read(files, has_token_rows)

    def _read(self, files: Mapping[str, str], has_token_rows: bool) -> str:
        config = _decode(TOKENIZER_CONFIG_FILE, files, dict[str, Any])
        templates = self._templates(files, config)
        written = "".join((templates or self._tokenizer.templates).values())
        # Where a name has no token, a template writes nothing.
        names = {*NAMED_TOKENS, *self._tokenizer.named_tokens}
        named = {name: "" for name in names if name in written and config.get(name, name) is None}
        named |= {name: token for name, token in _named(config) if name in written}
        pad = None if "pad_token" in named else dict(_named(config)).get("pad_token")
        self._check_tokens(_added(files, config), has_token_rows, written, pad, config)
        own = _decode(OWN_FILE, files, _Own)
        generation = self._generation(files)
        use = AdapterUse(
            chat_templates=templates,
            named_tokens={n: t for n, t in named.items() if t != self._tokenizer.named_tokens.get(n, "")},
            system_prompt=own.system_prompt,
            **generation | ({} if own.max_tokens is None else {"max_tokens": own.max_tokens}),
        )
        if (num_bytes := len(use.text.encode())) > MAX_TEXT_BYTES:
            raise UseError(
                f"the folder's chat templates and system prompt have {num_bytes} bytes, at most {MAX_TEXT_BYTES} are "
                "kept of an adapter"
            )
        return use.text

    def _templates(self, files: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
        """The folder's chat templates; none if they are the base's, or if it has none. Raises UseError."""
        found = {**_configured_templates(config)}
        if (text := files.get(TEMPLATE_FILE)) is not None:
            # As in transformers, the files replace the field.
            found = {DEFAULT_TEMPLATE: text}
            if (tool_text := files.get(TOOL_TEMPLATE_FILE)) is not None:
                found[_TOOL_TEMPLATE] = tool_text
        if not found:
            return {}
        if DEFAULT_TEMPLATE not in found:
            raise UseError(f"{TOKENIZER_CONFIG_FILE}: chat_template has {', '.join(found)} and none named default")
        templates = {name: found[name] for name in (DEFAULT_TEMPLATE, _TOOL_TEMPLATE) if name in found}
        base = {name: text for name, text in self._tokenizer.templates.items() if name in templates}
        if templates == base and (_TOOL_TEMPLATE in templates) == (_TOOL_TEMPLATE in self._tokenizer.templates):
            return {}
        if (num_bytes := sum(len(text.encode()) for text in templates.values())) > MAX_TEXT_BYTES:
            # To compile them takes seconds for each MiB.
            raise UseError(f"the chat templates have {num_bytes} bytes, an adapter may have {MAX_TEXT_BYTES}")
        for name, text in templates.items():
            _check_template(name, text)
        return templates

    def _check_tokens(
        self,
        added: Mapping[str, int],
        has_token_rows: bool,
        written: str,
        pad: str | None,
        config: Mapping[str, Any],
    ) -> None:
        """Raises UseError for a token that the base's tokenizer has not, or under another id.

        A token that only pads is in no prompt and no answer.
        """
        in_use = {token for name, token in _named(config) if name != "pad_token"}
        for token, token_id in added.items():
            if (base_id := self._tokenizer.token_id(token)) == token_id:
                continue
            is_padding = token == pad and token not in written and token not in in_use
            if is_padding or (has_token_rows and base_id is None and 0 <= token_id < self._vocab_size):
                continue
            other = "" if base_id is None else f", where it is {base_id}"
            raise UseError(
                f"the folder's tokenizer has the token {token[:80]!r} with the id {token_id}, which is not the base "
                f"model's{other}; train with the base model's tokenizer"
            )

    def _generation(self, files: Mapping[str, str]) -> dict[str, Any]:
        """The fields of `AdapterUse` that generation_config.json sets. Raises UseError."""
        raw = _decode(GENERATION_FILE, files, dict[str, Any])
        base = self._base_generation
        told = {name: value for name, value in raw.items() if value is not None and value != base.get(name)}
        known = {*_Generation.__struct_fields__, *_WITHOUT_EFFECT}
        for name, value in told.items():
            if name not in known and not (name in _NEUTRAL and value == _NEUTRAL[name]):
                raise UseError(
                    f"{GENERATION_FILE}: {name} is {str(value)[:80]}, which this server does not do; remove it, and "
                    "let requests say what they want"
                )
        fields = _decode(GENERATION_FILE, files, _Generation)
        use: dict[str, Any] = {}
        if "eos_token_id" in told:
            use["end_token_ids"] = self._end_tokens(fields.eos_token_id)
        if "max_new_tokens" in told:
            use["max_tokens"] = fields.max_new_tokens
        if "repetition_penalty" in told and fields.repetition_penalty != 1:
            use["repetition_penalty"] = fields.repetition_penalty
        draws = fields.do_sample is not False and (told.keys() & {*_SAMPLING, "do_sample"})
        if draws:
            use |= {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
            use.setdefault("top_k", 0)
        return use

    def _end_tokens(self, value: int | list[int] | None) -> tuple[int, ...]:
        ids = tuple(dict.fromkeys([value] if isinstance(value, int) else value or []))
        if wrong := [token_id for token_id in ids if not 0 <= token_id < self._vocab_size]:
            raise UseError(f"{GENERATION_FILE}: eos_token_id has {wrong[0]}, expected 0 .. {self._vocab_size - 1}")
        return ids

    @cached_property
    def _base_generation(self) -> Mapping[str, Any]:
        path = self._model_path / GENERATION_FILE
        if not path.is_file():
            return {}
        text = path.read_text(encoding="utf-8")
        fields: dict[str, Any] = _decode(GENERATION_FILE, {GENERATION_FILE: text}, dict[str, Any])
        return fields


def _decode(name: str, files: Mapping[str, str], kind: Any) -> Any:
    """A JSON file of the folder, as `kind`; the empty one for a file that is not there. Raises UseError."""
    try:
        return msgspec.json.decode(files.get(name, "{}"), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UseError(f"{name}: {error}") from None


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The tokens of tokenizer_config.json by their names, which may be a model's own, such as `image_token`.

    Older versions write a token as an object.
    """
    own = config.get("extra_special_tokens")
    for name, token in {**config, **(own if isinstance(own, dict) else {})}.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            yield name, content


def _configured_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of tokenizer_config.json by their names. Raises UseError."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = value if isinstance(value, list) else [value]
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (KeyError, TypeError):
        raise UseError(f"{TOKENIZER_CONFIG_FILE}: chat_template is no text and no list of named texts") from None


def _added(files: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, int]:
    """The added tokens of all files, with their ids. Raises UseError."""
    try:
        decoder = config.get("added_tokens_decoder") or {}
        added = {str(token["content"]): int(token_id) for token_id, token in decoder.items()}
        added |= _decode(ADDED_TOKENS_FILE, files, dict[str, int])
        listed = _decode(TOKENIZER_FILE, files, dict[str, Any]).get("added_tokens") or []
        return added | {str(token["content"]): int(token["id"]) for token in listed}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UseError):
            raise
        raise UseError(f"the folder's added tokens cannot be read: {type(error).__name__}: {error}") from None


def _check_template(name: str, text: str) -> None:
    """Raises UseError for a template that does not compile."""
    from multilora_engine.text.chat_template import compile_fault  # imports Jinja, which few adapters need

    if fault := compile_fault(text):
        raise UseError(f"the folder's chat template {name!r} does not compile: {fault}")
