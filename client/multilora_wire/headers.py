"""The headers by which a server knows who asks."""

from __future__ import annotations

CLIENT_HEADER = "x-multilora-client"
"""A header of HTTP and gRPC, in lower case: the secret that a proxy or front shares with the server, then the caller
for whom it asks. A proxy removes this header from clients' requests."""

KEY_HEADER = "authorization"
"""The API key, as `Bearer KEY`. Triton passes no header of HTTP generate on: there it stands in the body."""

CANARY_KEY_VARIABLE = "MULTILORA_CANARY_KEY"
"""In the environment of a server: one more API key, for the base model alone. `multilora-serve` draws the key for its
own inferences."""


def bearer(api_key: str) -> dict[str, str]:
    """The header that has an API key; none without one."""
    return {KEY_HEADER: f"Bearer {api_key}"} if api_key else {}
