"""`OutputItems`: the reasoning, messages and calls that an answer of /v1/responses consists of, while it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from multilora_client.openai.tools.calls import CallDelta, Delta, ReasoningDelta, TextDelta

Event = dict[str, Any]


class _Item(ABC):
    """The item that is being written; `body` is its content so far."""

    def __init__(self, kind: str, request_id: str, place: int, body: dict[str, Any]) -> None:
        self.body = body | {"id": f"{kind}_{request_id}_{place}", "status": "in_progress"}
        self._place = {"item_id": self.body["id"], "output_index": place}
        self._index = place

    def open(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self._snapshot()}

    @abstractmethod
    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]: ...

    def close(self, status: str) -> Iterator[Event]:
        self.body["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self._snapshot()}

    def _snapshot(self) -> dict[str, Any]:
        """A copy of the body: earlier events are not to change with later pieces."""
        return dict(self.body)


class _Message(_Item):
    def __init__(self, request_id: str, place: int) -> None:
        super().__init__("msg", request_id, place, {"type": "message", "role": "assistant", "content": []})
        self._part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._part_place = self._place | {"content_index": 0}

    def open(self) -> Iterator[Event]:
        yield from super().open()
        yield {"type": "response.content_part.added", **self._part_place, "part": dict(self._part)}

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self._part["text"] += text
        self._part["logprobs"] = self._part["logprobs"] + logprobs
        yield {"type": "response.output_text.delta", **self._part_place, "delta": text, "logprobs": logprobs}

    def close(self, status: str) -> Iterator[Event]:
        part = dict(self._part)
        self.body["content"] = [part]
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **self._part_place, **told}
        yield {"type": "response.content_part.done", **self._part_place, "part": part}
        yield from super().close(status)


class _Reasoning(_Item):
    """What the model thought. It has no log-probs."""

    def __init__(self, request_id: str, place: int) -> None:
        super().__init__("rs", request_id, place, {"type": "reasoning", "summary": [], "content": []})
        self._part = {"type": "reasoning_text", "text": ""}
        self._part_place = self._place | {"content_index": 0}

    def open(self) -> Iterator[Event]:
        yield from super().open()
        yield {"type": "response.content_part.added", **self._part_place, "part": dict(self._part)}

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self._part["text"] += text
        yield {"type": "response.reasoning_text.delta", **self._part_place, "delta": text}

    def close(self, status: str) -> Iterator[Event]:
        part = dict(self._part)
        self.body["content"] = [part]
        yield {"type": "response.reasoning_text.done", **self._part_place, "text": part["text"]}
        yield {"type": "response.content_part.done", **self._part_place, "part": part}
        yield from super().close(status)


class _Call(_Item):
    def __init__(self, request_id: str, place: int, call: CallDelta) -> None:
        body = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": ""}
        super().__init__("fc", request_id, place, body)

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self.body["arguments"] += text
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def close(self, status: str) -> Iterator[Event]:
        told = {"name": self.body["name"], "arguments": self.body["arguments"]}
        yield {"type": "response.function_call_arguments.done", **self._place, **told}
        yield from super().close(status)


class OutputItems:
    """`items` has the complete items. Each piece of the answer belongs to the last item, or opens the next."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._open: _Item | None = None
        self._logprobs: list[dict[str, Any]] = []

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Add the log-probs of tokens whose text is in the next piece."""
        self._logprobs += logprobs

    def add(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case TextDelta(text):
                if not isinstance(self._open, _Message):
                    yield from self._start(_Message(self._request_id, self._next))
            case ReasoningDelta(text):
                if not isinstance(self._open, _Reasoning):
                    yield from self._start(_Reasoning(self._request_id, self._next))
            case CallDelta(arguments=text):
                if delta.call_id:
                    yield from self._start(_Call(self._request_id, self._next, delta))
        assert self._open is not None, "the first piece opens an item"
        if text:
            logprobs, self._logprobs = self._logprobs, []
            yield from self._open.add(text, logprobs)

    def finish(self, status: str, has_text: bool) -> Iterator[Event]:
        """End the last item. status: the item's, `completed` or `incomplete`. has_text: whether the answer may be text;
        then an empty one is an empty message."""
        if self._open is None and has_text:
            yield from self._start(_Message(self._request_id, self._next))
        yield from self._end(status)

    def _start(self, item: _Item) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        yield from item.open()

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.close(status)
            self.items.append(self._open.body)
            self._open = None

    @property
    def _next(self) -> int:
        """The place of the item after the open one."""
        return len(self.items) + (self._open is not None)
