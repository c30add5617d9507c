"""`Routes`: for each request in flight the front that gets its outputs and the sender that it is counted for."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass

from multilora_engine.errors import InvalidRequest, PermissionDenied, RateExceeded
from multilora_engine.lora.names import TaskId
from multilora_engine.process.messages import Stop
from multilora_engine.request import Sender

_MINUTE_S = 60.0


class RateLimits:
    """The rates of API keys. Belongs to the engine process, since all doors lead there.

    Each rate of a key has an allowance of a minute's worth, which is filled up all the time. A request is accepted
    while a rest is left. If it takes more than the rest, the key owes the excess, and its next request waits. The file
    of keys promises requests and tokens: these limits do not read the seconds of a client's account.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._full_at_s: dict[tuple[str, str], float] = {}

    def admit(self, sender: Sender, num_requests: int) -> None:
        """Take requests from the rest of the sender's key. Raises RateExceeded, and nothing is taken then."""
        self._check("tokens", sender.key_id, sender.tokens_per_minute)
        self._check("requests", sender.key_id, sender.requests_per_minute)
        self._take("requests", sender.key_id, sender.requests_per_minute, num_requests)

    def charge(self, sender: Sender, num_tokens: int) -> None:
        """Tokens were read or written for the sender's key."""
        self._take("tokens", sender.key_id, sender.tokens_per_minute, num_tokens)

    def _check(self, unit: str, key_id: str, per_minute: int | None) -> None:
        if per_minute is not None and (unit, key_id) in self._full_at_s:
            wait_s = self._full_at_s[unit, key_id] - self._now_s() - _MINUTE_S + _MINUTE_S / per_minute
            if wait_s > 0:
                raise RateExceeded(unit, per_minute, wait_s)

    def _take(self, unit: str, key_id: str, per_minute: int | None, amount: int) -> None:
        if per_minute is not None:
            before_s = max(self._full_at_s.get((unit, key_id), 0.0), self._now_s())
            self._full_at_s[unit, key_id] = before_s + amount * _MINUTE_S / per_minute


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


class Routes(UserDict[str, Route]):
    """Routes by the engine's request ids: exactly the requests that the engine has accepted and not finished.

    The cost of a stop depends only on the requests that it names, not on the others in flight.
    """

    def __init__(self, **routes: Route) -> None:
        self._named: dict[tuple[str, str], dict[str, None]] = {}
        super().__init__(routes)

    def __setitem__(self, request_id: str, route: Route) -> None:
        super().__setitem__(request_id, route)
        self._named.setdefault((route.sender.name, route.client_request_id), {})[request_id] = None

    def __delitem__(self, request_id: str) -> None:
        route = self[request_id]
        super().__delitem__(request_id)
        name = route.sender.name, route.client_request_id
        del self._named[name][request_id]
        if not self._named[name]:
            del self._named[name]

    def of_front(self, front: bytes) -> list[str]:
        """The requests that came through a front."""
        return [request_id for request_id, route in self.items() if route.front == front]

    def named_by(self, stop: Stop, needs_sender: bool) -> list[str]:
        """The requests in flight that a stop names, all of its own sender.

        The engine's id of a request names that request. A known sender may also use its own ids. Unknown senders cannot
        be told apart. So the client's id that an unknown sender names must belong to only one call, and it is refused
        if a stop `needs_sender`. Raises InvalidRequest, PermissionDenied.
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
        named = list(self._named.get((sender.name, wanted), ()))
        if not sender.is_known and len({self[request_id].call_id for request_id in named}) > 1:
            raise InvalidRequest(f"several requests in flight have the id {wanted!r}; name the stop_id of the answer")
        return named
