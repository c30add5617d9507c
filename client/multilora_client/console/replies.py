"""Replies as the page reads them: JSON, in which task ids are strings, since JavaScript's numbers have 53 bits."""

from __future__ import annotations

import gzip
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import Response

from multilora_client.openai.replies.events import EventStream
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo

_GZIP_LEVEL = 1
_MIN_GZIP_BYTES = 1024
_UNSAFE_IDS = (AdapterEvent, AdapterInfo)


def json_reply(value: Any) -> Response:
    """A value as JSON; a long one in gzip, which every browser reads."""
    body = encode(value)
    headers = {"Vary": "Accept-Encoding"}
    if len(body) >= _MIN_GZIP_BYTES:
        body, headers["Content-Encoding"] = gzip.compress(body, _GZIP_LEVEL), "gzip"
    return Response(body, media_type="application/json", headers=headers)


def encode(value: Any) -> bytes:
    return msgspec.json.encode(_with_text_ids(value))


def line(value: Any) -> str:
    """One line of a stream of JSON values."""
    return encode(value).decode() + "\n"


class JsonLines(EventStream):
    """Lines of JSON, whose generator is closed at once when the page hangs up."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[str, None]) -> None:
        super().__init__(lines)


def _with_text_ids(value: Any) -> Any:
    if isinstance(value, _UNSAFE_IDS):
        return {**msgspec.structs.asdict(value), "lora_task_id": str(value.lora_task_id)}
    if isinstance(value, dict):
        return {name: _with_text_ids(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_text_ids(member) for member in value]
    return value
