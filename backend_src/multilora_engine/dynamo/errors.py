"""Translates the engine's errors into Dynamo's: its front sends them to the client, or tries another worker."""

from __future__ import annotations

from dynamo.llm.exceptions import (
    Cancelled,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Unknown,
    WorkerUnavailable,
)

from multilora_engine.dynamo.fleet_uploads import UploadLost
from multilora_engine.errors import EngineUnavailable, RateExceeded, RequestError

_TOO_MANY_REQUESTS = 429

_BY_CODE: dict[str, type[DynamoException]] = {
    "INVALID_ARG": InvalidArgument,
    "NOT_FOUND": InvalidArgument,
    "ALREADY_EXISTS": InvalidArgument,
    "UNSUPPORTED": InvalidArgument,
    "PERMISSION_DENIED": InvalidArgument,
    "UNAUTHENTICATED": InvalidArgument,
    "UNAVAILABLE": WorkerUnavailable,
    "CANCELLED": Cancelled,
}


def dynamo_error(error: RequestError) -> DynamoException | HttpError:
    """The exception for an error. After EngineUnavailable another worker may go on where this one stopped."""
    if isinstance(error, UploadLost) and error.may_be_elsewhere:
        # Dynamo's front sends no weights: it tries another worker, which may reach the one that has them.
        error = EngineUnavailable(str(error))
    text = f"[{error.code}] {error}"
    if isinstance(error, EngineUnavailable):
        return EngineShutdown(text)
    if error.code == RateExceeded.code:
        return HttpError(_TOO_MANY_REQUESTS, text)
    return _BY_CODE.get(error.code, Unknown)(text)
