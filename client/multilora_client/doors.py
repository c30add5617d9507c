"""`Door`: the models of the server that answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Door:
    """The models that answer, and their names for the inputs that all doors share.

    `stop_model` and `upload_model` are asked directly in any case: an ensemble passes neither on.
    """

    stream_model: str
    unary_model: str
    stop_model: str = "generation"
    upload_model: str = "generation_unary"
    input_names: Mapping[str, str] = field(default_factory=dict)


DIRECT = Door("generation", "generation_unary")
"""The engine's own models: cancellation reaches them, and errors keep their place in a stream."""

ENSEMBLE = Door(
    "ensemble",
    "ensemble_unary",
    input_names={
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "streaming": "stream",
        "len_penalty": "length_penalty",
    },
)
"""preprocessing -> generation, the door that TensorRT-LLM clients know. It takes no `input_ids`."""
