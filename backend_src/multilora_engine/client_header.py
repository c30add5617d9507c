"""`CLIENT_HEADER`: who a client is. `multilora-serve` has the server pass it on, and the fronts read it."""

from __future__ import annotations

CLIENT_HEADER = "x-multilora-client"
"""Of HTTP and gRPC, in lower case. An authenticating proxy sets it, and takes off what clients send under this name."""
