"""Starts OpenAI's front before a server, as users start it; the front ends with the script."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from multilora_wire.end_with_parent import end_with_parent

_START_S = 60.0


@contextmanager
def started_openai_front(grpc_url: str, *options: str) -> Iterator[str]:
    """`multilora openai` with these options more; its `host:port`. grpc_url: `host:port` of the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(Path(sys.executable).with_name("multilora")), "openai", f"--port={port}"]
    command += [f"--url=grpc://{grpc_url}", *options]
    with subprocess.Popen(end_with_parent(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as front:
        try:
            deadline = time.monotonic() + _START_S
            while not _answers(f"http://127.0.0.1:{port}/v1/models"):
                assert front.poll() is None, "it said why"
                assert time.monotonic() < deadline, f"the front does not answer after {_START_S:g} s"
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            front.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url).is_success
    except httpx2.TransportError:
        return False
