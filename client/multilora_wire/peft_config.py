"""`PeftConfig`: PEFT's `adapter_config.json`, read by allow-list.

A field that nobody here understands is refused by its name and value, unless the field is empty. A field of a kind of
adapters that is not served is refused with advice (`_REFUSED_FIELDS`). To serve a kind, move its fields to
`_READ_FIELDS` and give `PeftConfig` a property that checks and returns the value.

Nobody here matches a regular expression of a stranger, who could write one that takes for ever: `target_modules` and
`exclude_modules` count where they are lists, and patterns of ranks and alphas must be plain (`_PLAIN_PATTERN`), unless
the caller trusts them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from multilora_wire.messages import shown
from multilora_wire.sites import ModelSites

PEFT_CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"

MAX_CONFIG_BYTES = 256 << 10
"""Parsing JSON keeps other threads of the interpreter waiting: 3 ms for so much."""

MAX_QUOTED_CHARS = 200

MLX_ADVICE = (
    "MLX wrote this adapter, and PEFT's form is served: adapter_model.safetensors with lora_A.weight = lora_a "
    "transposed and lora_B.weight = lora_b transposed for each module, and adapter_config.json with peft_type LORA, r "
    "and lora_alpha = scale x r"
)
BIASES_ADVICE = "biases are not supported"

_HARMLESS_FIELDS = frozenset(
    {
        # These say how the adapter was trained, saved or loaded. `peft_experts` reads the version.
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "runtime_config",
        "merge_weights",
        # These say which modules were adapted; `check_target` reads the lists among them.
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        # The order of random numbers before training.
        "init_weights",
        # PEFT itself resets this one for linear layers.
        "fan_in_fan_out",
        # These count only beside another field, which is read or refused.
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        # These change gradients, or the weights while they are trained.
        "velora_config",
        "monteclora_config",
    }
)
"""Fields that change no answer, whatever their values."""

_READ_FIELDS = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "use_bdlora",
        "alora_invocation_tokens",
        "context_length",
        "rope_parameters",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "init_lora_weights",
        "bias",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "modules_to_save",
        "trainable_token_indices",
        "token_indices",
    }
)

_REFUSED_FIELDS: Mapping[str, str] = {
    "lora_bias": BIASES_ADVICE,
    "layer_replication": "replicated layers are not supported",
    "invocation_string": "this is activated LoRA in the form of IBM's package alora, which is not supported; train it "
    "with PEFT, whose field is alora_invocation_tokens",
    "use_qalora": "QA-LoRA is not supported",
    "arrow_config": "routed LoRA is not supported",
    "kasa_config": "KaSA, which changes the base model's weights, is not supported",
    "megatron_config": "LoRA on Megatron's parallel layers is not supported",
}

_REFUSED_LISTS = frozenset({"layer_replication"})
"""Those fields of `_REFUSED_FIELDS` that do nothing where they are empty."""

_TOKENS = "TRAINABLE_TOKENS"
"""PEFT's tuner that trains rows of tokens alone."""

_CONVERTIBLE = frozenset(
    {
        *("C3A", "DELORA", "FOURIERFT", "GRALORA", "LOHA", "LOKR", "MISS", "PSOFT", "RANDLORA", "TINYLORA"),
        *("UNILORA", "VBLORA", "VERA", "WAVEFT"),
    }
)
"""Kinds that PEFT 0.21 converts to LoRA (`peft.convert_to_lora`, `peft.save_as_lora`)."""

_MLX_FIELDS = ("fine_tune_type", "lora_parameters")

_BASE_IS_CHANGED = "save it with PEFT's path_initial_model_for_weight_conversion"

_REFUSED_INITIALISATIONS: Mapping[str, str] = {
    **dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), _BASE_IS_CHANGED),
    "loftq": "it belongs to the weights that LoftQ made of them",
}
"""These change the model's weights first. Adapters that were trained then are no difference to the original model."""

_INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")
_BIASES = ("none", "all", "lora_only")
_BLOCK_FIELDS = frozenset({"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"})

_KNOWN_FIELDS = _READ_FIELDS | _HARMLESS_FIELDS

_LARGEST_SETTING = 1e30
"""Of ranks and alphas: float32 holds it."""

_PLAIN_PATTERN = re.compile(r"[\w.|^$\\-]{0,1000}", re.ASCII)
"""Names of modules, alternatives, anchors and escapes: no expression of these takes long to match."""

_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
"""Of a layer."""

_ANY_NAMES = r".*\."
"""The beginning of the patterns that PEFT makes of an adapter on experts when transformers 5 has loaded it."""

_LARGEST_LENGTH = 1 << 30
"""Of sequences: their positions fit into 32 bits."""

_PATTERNS_PER_COLUMN = 2
_MAX_MATCHES = 8_000_000
_CHARS_PER_PATTERN = 64
_MAX_BLOCK_NAMES = 1024


class PeftError(Exception):
    """PEFT's files hold no adapter that can be served. The text names the file, field or key, with the numbers."""


class SitesMissing(PeftError):
    """The adapter cannot be read without the sites of its model."""


@dataclass(frozen=True)
class _Chosen:
    """The modules that PEFT adapts, as far as lists tell.

    targets: None where every module counts. parameters: targets by the names of parameters. layers: None where every
    layer counts. layer_lists: the places, in `layers_pattern`, of the names of lists of layers; empty for any list.
    """

    targets: frozenset[str] | None
    parameters: frozenset[str]
    excluded: frozenset[str]
    layers: frozenset[int | float] | None
    layer_lists: Mapping[str, int]

    def layer_of(self, module: str) -> int | None:
        """The number of a module's layer by PEFT's rule: the first number after the first list that is in the name.

        None where no list is.
        """
        names = module.split(".")
        found = []
        for index, number in enumerate(names[1:-1], 1):
            if _NUMBER.fullmatch(number):
                ends = _ends_of(".".join(names[:index]))
                places = [self.layer_lists[end] for end in ends if end in self.layer_lists]
                if not self.layer_lists and index > 1:
                    places = [0]
                found += [(place, index) for place in places]
        return int(names[min(found)[1]]) if found else None


@dataclass(frozen=True, eq=False)
class PeftConfig:
    """A configuration whose every field is understood.

    fields: the JSON object. rank_patterns, alpha_patterns: compiled, in their order.
    """

    fields: Mapping[str, Any]
    rank_patterns: tuple[tuple[re.Pattern[str], Any], ...]
    alpha_patterns: tuple[tuple[re.Pattern[str], Any], ...]

    @property
    def base_model(self) -> str:
        """The name that the adapter gives its base model; "" without one."""
        name = self.fields.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    @property
    def use_dora(self) -> bool:
        return bool(self.fields.get("use_dora"))

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """The tokens from which on an activated adapter (aLoRA) counts; none for an adapter that counts everywhere."""
        return tuple(self.fields.get("alora_invocation_tokens") or ())

    @property
    def trains_tokens_alone(self) -> bool:
        """Whether the adapter is of the tuner TRAINABLE_TOKENS, which has no LoRA."""
        return self.fields.get("peft_type") == _TOKENS

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """The names in `modules_to_save`. Raises PeftError."""
        names = self.fields.get("modules_to_save") or []
        if not _is_list_of_names(names):
            raise PeftError(f"{PEFT_CONFIG_FILE}: modules_to_save is {quoted(names)}, a list of names is expected")
        return tuple(names)

    def token_lists(self, modules: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """The tokens whose rows were trained, by module, in the order of their rows.

        modules: the names in PEFT's model of the embeddings, which a plain list is about, and of the head, by other
        names, which the answer has. Raises PeftError.
        """
        if self.trains_tokens_alone:
            tokens = _token_list("token_indices", self.fields.get("token_indices"))
            names = self.fields.get("target_modules") or next(iter(modules.values()))
            named = [names] if isinstance(names, str) else _listed(names)
            return {module: tokens for module, name in modules.items() if any(_ends(name, end) for end in named)}
        value = self.fields.get("trainable_token_indices")
        if not isinstance(value, dict):
            tokens = _token_list("trainable_token_indices", value)
            return {} if value is None else {next(iter(modules)): tokens}
        lists = {}
        for end, tokens in value.items():
            named = [module for module, name in modules.items() if _ends(name, end)]
            if len(named) != 1 or named[0] in lists:
                raise PeftError(
                    f"{PEFT_CONFIG_FILE}: trainable_token_indices names {quoted(end)}; only rows of embed_tokens and "
                    "lm_head are served, each once"
                )
            lists[named[0]] = _token_list("trainable_token_indices", tokens)
        return lists

    @property
    def rope(self) -> str:
        """The rotary embeddings of the adapter itself, as JSON: rope_parameters, or an object with context_length.

        Empty for an adapter with the rotary embeddings of its base.
        """
        length, parameters = self.fields.get("context_length"), self.fields.get("rope_parameters")
        own = parameters or ({"context_length": length} if length else None)
        return json.dumps(own, sort_keys=True, separators=(",", ":")) if own else ""

    def is_on(self, field: str) -> bool:
        """Whether PEFT computes, or trained, with the variant of this field."""
        return not _is_off(field, self.fields.get(field))

    def settings_name(self, module: str) -> str:
        """The name by which patterns know a linear of PEFT's model: that of its weight, if the weight is a target."""
        weight = f"{module}.weight"
        return module if self._chosen.parameters.isdisjoint(_ends_of(weight)) else weight

    def rank(self, module: str) -> float:
        """The rank that the configuration gives a module, or a parameter, of PEFT's model. Raises PeftError."""
        return self._setting(self.rank_patterns, "r", module)

    def scaling(self, module: str, rank: int) -> float:
        """The factor of a module's update: alpha / rank, or alpha / sqrt(rank). Raises PeftError."""
        alpha = self._setting(self.alpha_patterns, "lora_alpha", module)
        return alpha / math.sqrt(rank) if self.fields.get("use_rslora") else alpha / rank

    def num_blocks(self, module: str) -> tuple[int, int]:
        """How many blocks stand on the diagonals of a module's A and B; 1 is a whole matrix. Raises PeftError."""
        if not self.is_on("use_bdlora"):
            return 1, 1
        blocks = self.fields["use_bdlora"]
        is_a, is_b = (
            any(name in module for name in blocks.get(field) or ())
            for field in ("target_modules_bd_a", "target_modules_bd_b")
        )
        if is_a and is_b:
            raise PeftError(f"{PEFT_CONFIG_FILE}: use_bdlora is {quoted(blocks)}, which has {module} in both lists")
        count = blocks.get("nblocks", 1)
        return (count if is_a else 1), (count if is_b else 1)

    def check_target(self, module: str, others: Iterable[str] = ()) -> None:
        """Refuse the matrices of a module, or of a parameter, that PEFT would leave out. Raises PeftError.

        module: in PEFT's model. others: names by which the lists may mean it, too. Lists are looked at, regular
        expressions are not.
        """
        chosen, ends = self._chosen, _ends_of(module)
        if not chosen.parameters.isdisjoint(ends):  # No other field is about parameters.
            return
        is_listed = chosen.targets is None or not chosen.targets.isdisjoint(ends)
        if not is_listed:
            listed = (chosen.targets or frozenset()) | chosen.parameters
            is_listed = any(not listed.isdisjoint(_ends_of(other)) for other in others)
        left_out_by = ""
        if not chosen.excluded.isdisjoint(ends):
            left_out_by = "exclude_modules"
        elif not is_listed:
            left_out_by = "target_modules" if chosen.targets or not chosen.parameters else "target_parameters"
        elif chosen.layers is not None and module not in (chosen.targets or ()):
            layer = chosen.layer_of(module)
            if layer is None and chosen.layer_lists:
                left_out_by = "layers_pattern"
            elif layer not in chosen.layers:
                left_out_by = "layers_to_transform"
        if left_out_by:
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: {left_out_by} is {quoted(self.fields[left_out_by])}, which leaves out {module}, "
                f"and {PEFT_WEIGHTS_FILE} has matrices for it"
            )

    @cached_property
    def _chosen(self) -> _Chosen:
        targets, layers = self.fields.get("target_modules"), self.fields.get("layers_to_transform")
        patterns, parameters = self.fields.get("layers_pattern"), _names(self.fields.get("target_parameters"))
        lists = _listed(patterns) if patterns else []
        counts = isinstance(targets, list) and layers not in (None, [])
        if parameters:
            targets = targets or []
        elif not targets:
            targets = None
        return _Chosen(
            _names(targets) if isinstance(targets, list) else None,
            parameters,
            _names(self.fields.get("exclude_modules")),
            frozenset(layer for layer in _listed(layers) if isinstance(layer, int | float)) if counts else None,
            {str(name): place for place, name in reversed([*enumerate(lists)])},
        )

    def _setting(self, patterns: tuple[tuple[re.Pattern[str], Any], ...], field: str, module: str) -> float:
        """PEFT's rule: the first pattern that matches the end of the module's name, after a dot, decides."""
        value = next((value for pattern, value in patterns if pattern.match(module)), self.fields.get(field))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PeftError(f"{PEFT_CONFIG_FILE}: {field} of {module} is {quoted(value)}, not a number")
        if not abs(value) <= _LARGEST_SETTING:
            raise PeftError(f"{PEFT_CONFIG_FILE}: {field} of {module} is beyond {_LARGEST_SETTING:g}")
        return value


def parse_peft_config(text: bytes | memoryview, sites: ModelSites | None = None, trusts: bool = False) -> PeftConfig:
    """Read and check a configuration.

    sites: of the model that the adapter is for, which bound the number of patterns. trusts: whether patterns may be any
    regular expressions. Raises PeftError naming the field that stands in the way.
    """
    check_config_bytes(len(text))
    try:
        fields = json.loads(bytes(text))
    except ValueError as error:
        raise PeftError(f"{PEFT_CONFIG_FILE} is not JSON: {error}") from None
    except RecursionError:
        raise PeftError(f"{PEFT_CONFIG_FILE} is nested too deeply") from None
    if not isinstance(fields, dict):
        raise PeftError(f"{PEFT_CONFIG_FILE} is not a JSON object")
    if any(field in fields for field in _MLX_FIELDS):
        raise PeftError(f"{PEFT_CONFIG_FILE}: {MLX_ADVICE}")
    _check_fields(fields)
    _check_initialisation(fields.get("init_lora_weights", True))
    _check_blocks(fields)
    _check_invocation(fields)
    _check_rope(fields)
    if not isinstance(fields.get("target_parameters"), list | None):
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: target_parameters is {quoted(fields['target_parameters'])}, a list of names is "
            "expected"
        )
    if biases := [name for name in _names(fields.get("target_parameters")) if name.endswith("bias")]:
        raise PeftError(f"{PEFT_CONFIG_FILE}: target_parameters names {shown(biases[0])}; {BIASES_ADVICE}")
    max_patterns = None if sites is None else _max_patterns(sites.num_columns)
    patterns = (tuple(_compiled(fields, field, max_patterns, trusts)) for field in ("rank_pattern", "alpha_pattern"))
    return PeftConfig(fields, *patterns)


def _max_patterns(num_columns: int) -> int:
    """Each pattern is matched with the name of each linear, one expert's too: their product is bounded."""
    return max(1, min(_PATTERNS_PER_COLUMN * num_columns, _MAX_MATCHES // num_columns))


def check_config_bytes(num_bytes: int) -> None:
    """Raises PeftError for a configuration that is longer than any is read."""
    if num_bytes > MAX_CONFIG_BYTES:
        raise PeftError(f"{PEFT_CONFIG_FILE} has {num_bytes} bytes, at most {MAX_CONFIG_BYTES} are read")


def quoted(value: object) -> str:
    """A value for an error's text."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."


def _check_fields(fields: Mapping[str, Any]) -> None:
    if (kind := fields.get("peft_type", "LORA")) not in ("LORA", _TOKENS):
        advice = (
            "PEFT's save_as_lora writes it as LoRA, exactly or with the error that its rank leaves"
            if isinstance(kind, str) and kind in _CONVERTIBLE
            else "train LoRA"
        )
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: peft_type is {quoted(kind)}; only LORA and {_TOKENS} are served: {advice}"
        )
    if kind == "LORA" and fields.get("token_indices"):
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: token_indices is {quoted(fields['token_indices'])}, which LORA does not have; it has "
            "trainable_token_indices"
        )
    for field, value in fields.items():
        if field in _REFUSED_FIELDS and not _is_off(field, value):
            raise PeftError(f"{PEFT_CONFIG_FILE}: {field} is {quoted(value)}; {_REFUSED_FIELDS[field]}")
        if value and field not in _KNOWN_FIELDS:
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: {shown(field)} is {quoted(value)}, and this field of the "
                "configuration is not known: the adapter might not be plain LoRA. Set the field to null if it changes "
                "nothing"
            )
    if fields.get("bias", "none") not in _BIASES:
        raise PeftError(f"{PEFT_CONFIG_FILE}: bias is {quoted(fields['bias'])}; expected {', '.join(_BIASES)}")


def _check_initialisation(initialisation: Any) -> None:
    if isinstance(initialisation, bool | None):
        return
    name = initialisation.lower() if isinstance(initialisation, str) else ""
    for start, advice in _REFUSED_INITIALISATIONS.items():
        if name.startswith(start):
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: init_lora_weights is {quoted(initialisation)}, so the adapter is no difference "
                f"to the original model; {advice}"
            )
    if name not in _INITIALISATIONS:
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: init_lora_weights is {quoted(initialisation)}, which is not known: the adapter might "
            f"be no difference to the original model. Known are true, false, {', '.join(_INITIALISATIONS)}"
        )


def _check_blocks(fields: Mapping[str, Any]) -> None:
    """Check the settings of block-diagonal LoRA (PEFT's BdLoraConfig)."""
    blocks = fields.get("use_bdlora")
    if _is_off("use_bdlora", blocks):
        return
    problem = ""
    if not isinstance(blocks, dict):
        problem = "an object is expected"
    elif unknown := [name for name, value in blocks.items() if value and name not in _BLOCK_FIELDS]:
        problem = f"its {quoted(unknown[0])} is not known"
    elif type(blocks.get("nblocks", 1)) is not int or blocks.get("nblocks", 1) < 1:
        problem = "its nblocks must be a whole number, 1 or more"
    elif not all(_is_list_of_names(blocks.get(f) or []) for f in ("target_modules_bd_a", "target_modules_bd_b")):
        problem = f"its lists of modules must be lists of names, of {_MAX_BLOCK_NAMES} at most"
    elif fields.get("use_dora"):
        problem = "and use_dora is set, too: PEFT has no such variant"
    if problem:
        raise PeftError(f"{PEFT_CONFIG_FILE}: use_bdlora is {quoted(blocks)}; {problem}")


def _check_invocation(fields: Mapping[str, Any]) -> None:
    """Check the tokens that activate the adapter."""
    tokens = fields.get("alora_invocation_tokens")
    if not tokens and isinstance(tokens, list | None):
        return
    problem = ""
    if not isinstance(tokens, list) or not all(type(token_id) is int for token_id in tokens):
        problem = "a list of token ids is expected"
    elif other := next((field for field in ("use_dora", "use_bdlora") if not _is_off(field, fields.get(field))), ""):
        problem = f"and {other} is set, too: PEFT has no such variant"
    if problem:
        raise PeftError(f"{PEFT_CONFIG_FILE}: alora_invocation_tokens is {quoted(tokens)}; {problem}")


def _check_rope(fields: Mapping[str, Any]) -> None:
    """Check the forms of the adapter's own rotary embeddings; the server knows whether its model can have them."""
    length, parameters = fields.get("context_length"), fields.get("rope_parameters")
    if length is not None and (type(length) is not int or not 0 < length <= _LARGEST_LENGTH):
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: context_length is {quoted(length)}, a whole number from 1 to {_LARGEST_LENGTH} is "
            "expected"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise PeftError(f"{PEFT_CONFIG_FILE}: rope_parameters is {quoted(parameters)}, an object is expected")
    if parameters and "context_length" in parameters:
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: rope_parameters has context_length, which is a field beside rope_parameters"
        )
    try:
        json.dumps(parameters, allow_nan=False)
    except ValueError:
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: rope_parameters is {quoted(parameters)}; only finite numbers are legal"
        ) from None
    if length and parameters:
        raise PeftError(f"{PEFT_CONFIG_FILE} has context_length and rope_parameters; one of them is enough")


def _is_off(field: str, value: object) -> bool:
    """Whether PEFT computes as without the field. An empty object is a variant with its default settings."""
    return value is None or value is False or (field in _REFUSED_LISTS and not value)


def _token_list(field: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise PeftError(f"{PEFT_CONFIG_FILE}: {field} is {quoted(value)}, a list of token ids is expected")
    return tuple(value)


def _ends_of(module: str) -> set[str]:
    """The names in a list that mean a module, by PEFT's rule: its whole name, or its end after a dot."""
    return {module.split(".", count)[-1] for count in range(module.count(".") + 1)}


def _ends(module: str, name: object) -> bool:
    """PEFT's rule: a name is a module's whole name, or its end."""
    return isinstance(name, str) and bool(name) and module.endswith(name)


def _is_list_of_names(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) <= _MAX_BLOCK_NAMES
    return is_list and all(isinstance(name, str) for name in value)


def _names(value: object) -> frozenset[str]:
    """The names in a list. A regular expression in its place has none."""
    return frozenset(name for name in value if isinstance(name, str)) if isinstance(value, list) else frozenset()


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _compiled(
    fields: Mapping[str, Any], field: str, max_patterns: int | None, trusts: bool
) -> Iterator[tuple[re.Pattern[str], Any]]:
    patterns = fields.get(field) or {}
    if not isinstance(patterns, dict):
        raise PeftError(f"{PEFT_CONFIG_FILE}: {field} is {quoted(patterns)}, an object is expected")
    if max_patterns is not None and len(patterns) > max_patterns:
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: {field} has {len(patterns)} entries, an adapter of this model {max_patterns} at most"
        )
    num_chars = sum(map(len, patterns))
    if max_patterns is not None and num_chars > (most := _CHARS_PER_PATTERN * max_patterns):
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: {field} has {num_chars} characters of patterns, an adapter of this model {most} at "
            "most"
        )
    for pattern, value in patterns.items():
        end = pattern.removeprefix(_ANY_NAMES)
        has_names_before = end != pattern and "|" not in end
        if not trusts and _PLAIN_PATTERN.fullmatch(end if has_names_before else pattern) is None:
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: {field} has the expression {quoted(pattern)}; only names of modules, "
                "alternatives (|) and anchors are taken. Convert the adapter first (multilora convert)"
            )
        try:
            # Not `(.*\.)?(.*\.name)`, which matches the same and takes the square of the time.
            regex = rf"(.*\.)({end})$" if has_names_before else rf"(.*\.)?({pattern})$"
            yield re.compile(regex), value
        except (re.error, RecursionError, OverflowError) as error:
            raise PeftError(f"{PEFT_CONFIG_FILE}: {field} has the invalid pattern {quoted(pattern)}: {error}") from None
