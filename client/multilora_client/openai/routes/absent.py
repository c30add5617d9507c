"""Answers requests for paths that are not served, and names the paths that are."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

from multilora_client.openai.errors import Failure

_SERVED = "/v1/chat/completions, /v1/completions, /v1/responses and /v1/models"
_OTHER_SERVICES: Mapping[str, str] = {
    "embeddings": "embeddings",
    "moderations": "moderation",
    "images": "images",
    "audio": "audio",
    "files": "files",
    "uploads": "files",
    "batches": "batches",
    "fine_tuning": "training",
    "assistants": "assistants",
    "threads": "assistants",
    "vector_stores": "vector stores",
    "realtime": "audio",
    "rerank": "reranking",
    "score": "scoring",
    "pooling": "embeddings",
    "classify": "classification",
    "conversations": "stored conversations",
}
"""The services by the first part of a path, after /v1 if the path begins with it."""


def not_served(request: Request) -> Failure:
    """The error of a path that is none of ours (404)."""
    path = request.url.path[:200]
    first = path.removeprefix("/v1").strip("/").partition("/")[0]
    reason = f"this server generates text and has no {_OTHER_SERVICES[first]}; " if first in _OTHER_SERVICES else ""
    return Failure(404, f"{path} is not served here: {reason}there are {_SERVED}", "not_served")


def wrong_method(request: Request, headers: Mapping[str, str] | None) -> Failure:
    """The error of a path of ours with another method (405). headers: name the methods that the path takes."""
    allowed = (headers or {}).get("Allow", "another method")
    return Failure(
        405,
        f"{request.method} is not served at {request.url.path[:200]}: use {allowed}",
        "wrong_method",
        headers=headers,
    )
