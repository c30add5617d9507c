"""Paths that are read: by GET, and by HEAD, which asks for no more than the status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def reads(router: APIRouter, path: str, in_schema: bool = True) -> Callable[[Endpoint], Endpoint]:
    """Decorator of the function that answers at `path`."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.get(path, response_model=None, include_in_schema=in_schema)(endpoint)
        router.head(path, response_model=None, include_in_schema=False)(endpoint)
        return endpoint

    return register
