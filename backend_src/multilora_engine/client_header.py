"""The headers that identify a client. `multilora-serve` has the server pass them on, and the fronts read them."""

from __future__ import annotations

from multilora_wire.headers import CLIENT_HEADER, KEY_HEADER

PASSED_ON = (CLIENT_HEADER, KEY_HEADER)

CANARY_KEY_VARIABLE = "MULTILORA_CANARY_KEY"
"""In the environment of a server: one more API key, for the base model alone, which its supervisor draws for its own
inferences."""


def bearer(api_key: str) -> dict[str, str]:
    """The header that has an API key; none without one."""
    return {KEY_HEADER: f"Bearer {api_key}"} if api_key else {}
