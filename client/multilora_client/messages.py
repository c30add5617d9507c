"""`InferRequest` and `Response`: a request as named tensors, an answer as named lists of values. No I/O, no state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multilora_client.errors import InvalidRequest
from multilora_client.tensors import Tensor
from multilora_wire.headers import CLIENT_HEADER, KEY_HEADER

_MAX_TIMEOUT_S = 1e9
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(text: str) -> bool:
    """Whether the text is the header of that name, version 00 of W3C's trace context."""
    return _TRACEPARENT.fullmatch(text) is not None


@dataclass(frozen=True)
class InferRequest:
    """One request to one model. `timeout_s` None waits for ever; `traceparent` is a header, empty for none, as are
    `api_key` and `on_behalf_of`.
    """

    model: str
    request_id: str
    inputs: Mapping[str, Tensor]
    timeout_s: float | None = None
    traceparent: str = ""
    api_key: str = field(default="", repr=False)
    on_behalf_of: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.traceparent and not is_traceparent(self.traceparent):
            raise InvalidRequest(f"traceparent is {self.traceparent!r}, expected 00-TRACE-SPAN-FLAGS in hexadecimal")
        if self.timeout_s is not None and not 0 < self.timeout_s <= _MAX_TIMEOUT_S:  # a NaN is neither
            raise InvalidRequest(f"timeout_s must be more than 0 and at most {_MAX_TIMEOUT_S:g}, not {self.timeout_s}")

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go beside the tensors."""
        named = {"traceparent": self.traceparent, CLIENT_HEADER: self.on_behalf_of}
        return {name: value for name, value in named.items() if value} | self.authorization

    @property
    def authorization(self) -> dict[str, str]:
        """The header that has the API key, in lower case. Raises InvalidRequest for a key that it cannot carry."""
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequest("the API key has a line break or a letter that is not ASCII, which no header carries")
        return {KEY_HEADER: f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Response:
    """One response: values of each output in row-major order, and whether the server said that it is the last one.

    A transport without such a flag (HTTP) leaves `is_final` False. shapes: of the outputs; of none in events of HTTP.
    """

    outputs: Mapping[str, Sequence[Any]]
    is_final: bool = False
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def first(self, name: str) -> Any:
        """The first value of an output, None when it is absent or empty."""
        return next(iter(self.outputs.get(name, ())), None)

    def split(self, name: str, count: int) -> list[Sequence[Any]]:
        """The values of an output in `count` equal parts, one for each answer; empty ones when it is absent."""
        values = self.outputs.get(name, ())
        size = len(values) // count
        return [values[i * size : (i + 1) * size] for i in range(count)]
