"""OpenAI's protocol before a server, as `multilora openai` has it, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from multilora_client import AsyncClient
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue


@contextmanager
def openai_front(catalogue: Catalogue, grpc_url: str) -> Iterator[str]:
    """Its URL, with /v1. grpc_url: host:port of the server."""
    app = make_app(catalogue, lambda: AsyncClient(f"grpc://{grpc_url}"))
    front = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=front.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            front.should_exit = True
            thread.join()
