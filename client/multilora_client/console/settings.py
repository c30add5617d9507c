"""`ConsoleSettings`: the settings of the console. The command line knows them without the extra."""

from __future__ import annotations

from dataclasses import dataclass

MAX_UPLOAD_BYTES = 512 << 20


@dataclass(frozen=True)
class ConsoleSettings:
    """is_read_only: whether adapters can be looked at and asked, but neither uploaded, loaded, pinned nor unloaded.

    hosts: names that the console is reached by, besides `localhost` and addresses.
    max_upload_bytes: of one adapter's files together.
    server_url, http_url, openai_url: the addresses in the code that the page shows; an empty one is the usual.
    """

    is_read_only: bool = False
    hosts: tuple[str, ...] = ()
    max_upload_bytes: int = MAX_UPLOAD_BYTES
    server_url: str = ""
    http_url: str = ""
    openai_url: str = ""
