"""All errors that this package raises on purpose, as one tree.

    MultiloraClientError        .code, .request_id, .retryable
      AdapterError              an adapter directory cannot be read or converted, or was made for another base model;
                                names the file and the key, or the module and its sides
      InvalidRequest            INVALID_ARG      malformed or contradictory request
      NotFound                  NOT_FOUND        no such model
        AdapterNotFound                          the task id is not cached and no weights came with it
      AdapterConflict           ALREADY_EXISTS   the task id is served with other weights
      Unsupported               UNSUPPORTED      well-formed, but not done by this server
      Unavailable               UNAVAILABLE      try again later (`retryable`)
        CacheFull                                every cached adapter is pinned by a request in flight
        ServerUnreachable                        no server answers at the URL
        RateExceeded          RESOURCE_EXHAUSTED the API key's allowance of a minute is used up; `retry_after_s`
      Unauthenticated         UNAUTHENTICATED  the server has API keys, and the request has none of them
      PermissionDenied        PERMISSION_DENIED  the API key may not do that
      Cancelled                 CANCELLED        a `stop` request or the client ended it
      TimedOut                  DEADLINE         no answer within `timeout_s`
      ServerFault               INTERNAL         the server failed

On streams and on HTTP generate Triton hands only a message on, so the code is read from the text itself:
`in ensemble 'ensemble', [NOT_FOUND] LoRA task 7 not found in cache. ... (request ab12)`. Where the text has none, the
transport's own status decides.
"""

from __future__ import annotations

import re
from typing import ClassVar

_WIRE_MESSAGE = re.compile(
    r"(?:in ensemble '[^']*', )*"
    r"(?:\[(?P<code>[A-Z_]+)\] )?"
    r"(?P<text>.*?)"
    r"(?: \(request (?P<request_id>[^()]+)\))?",
    re.DOTALL,
)
_WAIT = re.compile(r"come back in (\d+(?:\.\d+)?) s")
_NOT_CACHED = "not found in cache"
_CACHE_FULL = "Cache is full. There are no done tasks to evict"


class MultiloraClientError(Exception):
    """The base of all errors that this package raises on purpose."""

    code: str = "UNKNOWN"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, code: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.request_id = request_id


class AdapterError(MultiloraClientError):
    """An adapter directory cannot be read or converted, or was made for another base model."""

    code = "INVALID_ADAPTER"


class InvalidRequest(MultiloraClientError):
    """Malformed or contradictory request, found here or by the server."""

    code = "INVALID_ARG"


class NotFound(MultiloraClientError):
    """The server has no such model."""

    code = "NOT_FOUND"


class AdapterNotFound(NotFound):
    """The adapter of the task id is not cached, and no weights came with the request."""


class AdapterConflict(MultiloraClientError):
    """The task id is served with other weights than this client's."""

    code = "ALREADY_EXISTS"


class Unsupported(MultiloraClientError):
    """The request is well-formed, but this server does not do it."""

    code = "UNSUPPORTED"


class Unavailable(MultiloraClientError):
    """Nothing is wrong with the request; try again later."""

    code = "UNAVAILABLE"
    retryable = True


class CacheFull(Unavailable):
    """Every cached adapter is pinned by a request in flight; there is room again when one of them ends."""


class ServerUnreachable(Unavailable):
    """No server answers at the URL."""


class RateExceeded(Unavailable):
    """The API key has used up its allowance of a minute."""

    code = "RESOURCE_EXHAUSTED"

    @property
    def retry_after_s(self) -> float:
        """The seconds until some allowance is left, as the server says; 0 if it does not say."""
        match = _WAIT.search(str(self))
        return float(match[1]) if match else 0.0


class Unauthenticated(MultiloraClientError):
    """The server has API keys, and the request came with none of them."""

    code = "UNAUTHENTICATED"


class PermissionDenied(MultiloraClientError):
    """The API key may not make this request."""

    code = "PERMISSION_DENIED"


class Cancelled(MultiloraClientError):
    """A `stop` request or the client ended the request."""

    code = "CANCELLED"


class TimedOut(MultiloraClientError):
    """No answer within `timeout_s`."""

    code = "DEADLINE"
    retryable = True


class ServerFault(MultiloraClientError):
    """The server failed; its log says more."""

    code = "INTERNAL"


_BY_CODE: dict[str, type[MultiloraClientError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        NotFound,
        AdapterConflict,
        Unsupported,
        Unavailable,
        RateExceeded,
        Unauthenticated,
        PermissionDenied,
        Cancelled,
        TimedOut,
        ServerFault,
    )
}
_BY_TEXT: dict[str, type[MultiloraClientError]] = {_NOT_CACHED: AdapterNotFound, _CACHE_FULL: CacheFull}


def parse_error(message: str, *, status: str = "UNKNOWN", request_id: str | None = None) -> MultiloraClientError:
    """The error that a server's message means.

    status: the transport's code. request_id: the request that was sent. Both are used if the text has none.
    """
    match = _WIRE_MESSAGE.fullmatch(message)
    assert match is not None, "every part of the pattern is optional"
    code = match["code"] or status
    named_request = None if match["request_id"] == "-" else match["request_id"]
    return _error_class(code, match["text"])(match["text"], code=code, request_id=named_request or request_id)


def _error_class(code: str, text: str) -> type[MultiloraClientError]:
    for substring, error in _BY_TEXT.items():
        if substring in text:
            return error
    return _BY_CODE.get(code, MultiloraClientError)
