"""What the front takes unless told otherwise. In a module of its own: the command line knows it without the extra."""

from __future__ import annotations

MAX_BODY_BYTES = 4 << 20
MAX_CONNECTIONS = 1000
MAX_CONNECTIONS_PER_ADDRESS = 128
REQUEST_TIMEOUT_S = 30.0
