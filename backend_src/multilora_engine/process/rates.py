"""`RateLimits`: how many requests and tokens each API key may cause in a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from multilora_engine.errors import RateExceeded
from multilora_engine.request import Sender

_MINUTE_S = 60.0


class _Allowance:
    """The rest of one rate: a minute's worth at most, filled up all the time; below zero it is a debt."""

    def __init__(self, now_s: float) -> None:
        self._full_at_s = now_s

    def wait_s(self, per_minute: int, now_s: float) -> float:
        """Seconds until one more may be taken; 0 for at once."""
        return max(0.0, self._full_at_s - now_s - _MINUTE_S + _MINUTE_S / per_minute)

    def take(self, amount: int, per_minute: int, now_s: float) -> None:
        self._full_at_s = max(self._full_at_s, now_s) + amount * _MINUTE_S / per_minute


class RateLimits:
    """Belongs to the engine process, since all doors lead there.

    A request is accepted while a rest is left. If it takes more than the rest, the key owes the excess, and its next
    request waits.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._requests: dict[str, _Allowance] = {}
        self._tokens: dict[str, _Allowance] = {}

    def admit(self, sender: Sender, num_requests: int) -> None:
        """Take requests from the rest of the sender's key. Raises RateExceeded, and nothing is taken then."""
        now_s = self._now_s()
        _check("tokens", self._tokens, sender.key_id, sender.tokens_per_minute, now_s)
        _check("requests", self._requests, sender.key_id, sender.requests_per_minute, now_s)
        _take(self._requests, sender.key_id, sender.requests_per_minute, num_requests, now_s)

    def charge(self, sender: Sender, num_tokens: int) -> None:
        """Tokens were read or written for the sender's key."""
        _take(self._tokens, sender.key_id, sender.tokens_per_minute, num_tokens, self._now_s())


def _check(unit: str, allowances: dict[str, _Allowance], key_id: str, per_minute: int | None, now_s: float) -> None:
    if per_minute is None or key_id not in allowances:
        return
    wait_s = allowances[key_id].wait_s(per_minute, now_s)
    if wait_s > 0:
        raise RateExceeded(unit, per_minute, wait_s)


def _take(allowances: dict[str, _Allowance], key_id: str, per_minute: int | None, amount: int, now_s: float) -> None:
    if per_minute is not None:
        allowances.setdefault(key_id, _Allowance(now_s)).take(amount, per_minute, now_s)
