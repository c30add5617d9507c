"""The headers that identify a client. `multilora-serve` has the server pass them on, and the fronts read them."""

from __future__ import annotations

CLIENT_HEADER = "x-multilora-client"
"""A header of HTTP and gRPC, in lower case. An authenticating proxy sets it, and removes it from clients' requests."""

KEY_HEADER = "authorization"
"""The API key, as `Bearer KEY`. Triton passes no header of HTTP generate on: there it stands in the body."""

PASSED_ON = (CLIENT_HEADER, KEY_HEADER)

CANARY_KEY_VARIABLE = "MULTILORA_CANARY_KEY"
"""In the environment of a server: one more API key, for the base model alone, which its supervisor draws for its own
inferences."""


def bearer(api_key: str) -> dict[str, str]:
    """The header that has an API key; none without one."""
    return {KEY_HEADER: f"Bearer {api_key}"} if api_key else {}
