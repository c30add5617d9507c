"""`Question`: one prompt and how it is to be answered, as the client library takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multilora_client.options import GenerateOptions


@dataclass(frozen=True)
class Question:
    """prompt: a text; None where the options have token ids or messages.

    tools_told: the messages in place of messages and tools, where the model's chat template has no place for tools.
    """

    prompt: str | None = None
    options: GenerateOptions = field(default_factory=GenerateOptions)
    tools_told: Sequence[Mapping[str, object]] | None = None
