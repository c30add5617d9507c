"""`HFConfig`: the fields of a Hugging Face `config.json` that the engine reads, as transformers would complete them.

Transformers itself takes seconds and 100 MB of every start to do so. Each family has a class of its own with the
family's defaults, beside its layers; tests compare all of them with transformers' `AutoConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from multilora_engine.errors import ConfigError

_SCALED = ("llama3", "yarn", "longrope")
"""Types of rotary embeddings that know the length of the prompts before they were scaled."""

WINDOWS = ("sliding_window", "layer_types")

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

_OLD_LAYER_TYPES = {"attention": "full_attention"}


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields under the names that nearly all decoders share; None stands for a field that is not written.

    original_max_position_embeddings: where it is written beside the rotary embeddings' own one, it counts.
    rope_scaling, rope_theta, partial_rotary_factor: older spellings of items of `rope_parameters`, which has them all
    once the config is `complete`.
    """

    knows_layer_types: ClassVar[bool] = False
    """Whether `rope_parameters` may have an object for each of `layer_types`."""

    unread: ClassVar[tuple[str, ...]] = ()
    """The fields that mean nothing to the family's layers, whatever a checkpoint has in them."""

    norm_eps_field: ClassVar[str] = "rms_norm_eps"
    activation_field: ClassVar[str] = "hidden_act"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    original_max_position_embeddings: Any = None
    is_causal: bool | None = None
    hidden_act: str | None = "silu"
    hidden_activation: str | None = None
    rms_norm_eps: float | None = None
    layer_norm_eps: float | None = None
    norm_epsilon: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = 10_000.0
    partial_rotary_factor: float | None = None
    per_layer_config: dict[str, Any] | None = None

    def complete(self) -> None:
        """Fill in the fields that follow from others. Raises ConfigError where fields contradict each other."""
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"config.json: {name} {getattr(self, name)} must be positive")
        if self.is_causal is False:
            raise ConfigError("config.json: is_causal false is not supported: answers come token by token; write true")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.fill_in()
        self.rope_parameters = self.complete_rope()
        if self.per_layer_config is not None:
            raise ConfigError("config.json: per_layer_config is not supported: all layers must have one shape")
        if self.layer_types is not None:
            self.layer_types = [_OLD_LAYER_TYPES.get(name, name) for name in self.layer_types]
            if len(self.layer_types) != self.num_hidden_layers:
                raise ConfigError(
                    f"config.json: layer_types has {len(self.layer_types)} items and num_hidden_layers is "
                    f"{self.num_hidden_layers}"
                )
        for name in self.unread:
            setattr(self, name, None)

    def fill_in(self) -> None:
        """The family's own part of `complete`."""

    def complete_rope(self) -> dict[str, Any]:
        """`rope_parameters`: one dict for all layers, or one for each of `layer_types`."""
        parameters = dict(self.rope_scaling or self.rope_parameters or {})
        by_type = {name: parameters[name] for name in parameters if name in (self.layer_types or ())}
        for name, own in by_type.items():
            if not isinstance(own, dict | None):
                raise ConfigError(f"config.json: rope_parameters of {name} must be an object, got {own!r}")
        if not by_type or not self.knows_layer_types:
            return self._with_original_length(self._with_defaults(parameters))
        return parameters | {name: self._with_defaults(own) for name, own in by_type.items() if own is not None}

    def _with_defaults(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        defaults: dict[str, Any] = {"rope_theta": self.rope_theta}
        if self.partial_rotary_factor is not None:
            defaults["partial_rotary_factor"] = self.partial_rotary_factor
        return with_rope_type(defaults | dict(parameters), self.max_position_embeddings)

    def _with_original_length(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Of all layers. transformers lets the field of the whole config count for these only."""
        if self.original_max_position_embeddings is not None and parameters["rope_type"] in _SCALED:
            parameters["original_max_position_embeddings"] = self.original_max_position_embeddings
        return parameters

    def check_heads(self) -> None:
        """Raises ConfigError unless the hidden size is divided among the heads without rest."""
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"config.json: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )

    def alternate_windows(self, pattern: int) -> list[str]:
        """A layer type for each layer: every `pattern`-th one attends to all tokens."""
        if pattern == 0:
            raise ConfigError("config.json: sliding_window_pattern must not be 0")
        layers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]


class WindowedConfig(HFConfig):
    """Of families with a window for the layers from `max_window_layers` on, if they use one at all."""

    knows_layer_types: ClassVar[bool] = True
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def fill_in(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
            layers = range(self.num_hidden_layers)
            self.layer_types = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]


_Fields = TypeVar("_Fields", bound=HFConfig)


def read_hf_config(raw: Mapping[str, Any], fields: Callable[..., _Fields]) -> _Fields:
    """The content of a `config.json` as a family's class completes it. Raises ConfigError, which names the field."""
    try:
        config: _Fields = msgspec.convert(raw, fields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None
    config.complete()
    return config


def with_rope_type(parameters: dict[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """`parameters` with `rope_type`, once spelled `type`, and with the length before scaling."""
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if not isinstance(parameters["rope_type"], str):
        raise ConfigError(f"config.json: rope_type must be a name, got {parameters['rope_type']!r}")
    if parameters["rope_type"] in _SCALED:
        parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
    return parameters
