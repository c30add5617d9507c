"""`Routes`: for each request in flight the front that gets its outputs and the sender that it is counted for."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_engine.errors import InvalidRequest, PermissionDenied
from multilora_engine.lora.names import TaskId
from multilora_engine.process.messages import Stop
from multilora_engine.request import Sender


@dataclass(frozen=True, slots=True)
class Route:
    """The front of a request, its sender, its adapter, and the names that the log gives it.

    call_id: the engine's id of the first request that came in the same message; equal for all of them.
    """

    front: bytes
    call_id: str
    client_request_id: str
    sender: Sender
    task_id: TaskId | None
    trace_id: str


class Routes(dict[str, Route]):
    """Routes by the engine's request ids: exactly the requests that the engine has accepted and not finished."""

    def of_front(self, front: bytes) -> list[str]:
        """The requests that came through a front."""
        return [request_id for request_id, route in self.items() if route.front == front]

    def named_by(self, stop: Stop, needs_sender: bool) -> list[str]:
        """The requests in flight that a stop names, all of its own sender.

        The engine's id of a request names that request. A known sender may use its own ids as well. Unknown senders
        cannot be told apart, so the client's id that one of them sends must belong to one call only, and is refused
        where a stop `needs_sender`. Raises InvalidRequest, PermissionDenied.
        """
        sender, wanted = stop.sender, stop.client_request_id
        issued = self.get(wanted)
        if issued is not None and issued.sender.name == sender.name:
            return [wanted]
        if not sender.is_known and needs_sender:
            raise PermissionDenied(
                "a stop by a request id of one's own needs an API key, or a proxy that names the client; without them "
                "name the stop_id of the answer"
            )
        named = [request_id for request_id, route in self.items() if _is_named(route, stop)]
        if not sender.is_known and len({self[request_id].call_id for request_id in named}) > 1:
            raise InvalidRequest(f"several requests in flight have the id {wanted!r}; name the stop_id of the answer")
        return named


def _is_named(route: Route, stop: Stop) -> bool:
    return route.sender.name == stop.sender.name and route.client_request_id == stop.client_request_id
