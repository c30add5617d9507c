"""Runs the proxy of docker/proxy on free ports of this machine, before a server that runs here."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from repository import REPOSITORY

SETTINGS = REPOSITORY / "docker" / "proxy"

_PORTS = ("8080", "8081", "8082", "8090", "8091", "8092", "8093", "8094")
"""The ports in docker/proxy: the first three are for peers."""

_NUM_FOR_PEERS = 3


class LocalProxy:
    """Debian's nginx, set up as docker/proxy has it. `http_url`, `grpc_url` and `metrics_url`: `host:port` to ask.

    It listens at the same ports of `[::1]`. `secret`: the text that it writes before the name of a client.

    http_port, grpc_port, metrics_port: of the server on the loopback. certificate, key: PEM files; peers use TLS then.
    changes: settings as they are written, and the text in their place. secret: by default a new one.
    """

    def __init__(
        self,
        http_port: int,
        grpc_port: int,
        metrics_port: int,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        changes: dict[str, str] | None = None,
        secret: str | None = None,
    ) -> None:
        self._server_ports = {"8000": http_port, "8001": grpc_port, "8002": metrics_port}
        self._tls = (certificate, key)
        self._changes = changes or {}
        self.secret = secret or secrets.token_hex(32)
        self.http_url = self.grpc_url = self.metrics_url = ""
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="multilora-proxy-")))
            folder.chmod(0o755)  # started by root, nginx works as nobody
            with ExitStack() as ours:
                # nginx inherits the sockets, as it does from its predecessor: no port can be lost in between.
                sockets = [ours.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in _PORTS]
                ports = [listening.getsockname()[1] for listening in sockets]
                for port in ports[:_NUM_FOR_PEERS]:
                    sockets.append(ours.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6)))
                for listening in sockets:
                    listening.setblocking(False)
                self._write_settings(folder, dict(zip(_PORTS, ports, strict=True)))
                process = _start(folder / "nginx.conf", [listening.fileno() for listening in sockets])
            resources.callback(process.wait)
            resources.callback(process.terminate)
            self._resources = resources.pop_all()
        self.http_url, self.grpc_url, self.metrics_url = (f"127.0.0.1:{port}" for port in ports[:_NUM_FOR_PEERS])
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _write_settings(self, folder: Path, ports: dict[str, int]) -> None:
        certificate, key = self._tls
        ports = ports | self._server_ports
        listen = SETTINGS / ("listen.conf" if certificate is None else "tls.conf")
        texts = {"listen 80": "listen 127.0.0.1:80", "listen [::]": "listen [::1]", "/tmp/": f"{folder}/"}
        texts |= {"/tls/tls.crt": str(certificate), "/tls/tls.key": str(key), "/secret/": f"{folder}/"}
        for source in (SETTINGS / "nginx.conf", listen, *SETTINGS.glob("*.js")):
            text = source.read_text()
            for before, after in {**self._changes, **texts}.items():
                text = text.replace(before, after)
            name = "listen.conf" if source == listen else source.name
            (folder / name).write_text(re.sub(r"\b80(?:[089][0-2]|9[34])\b", lambda port: str(ports[port[0]]), text))
        (folder / "client").write_text(self.secret)


def _start(settings: Path, sockets: list[int]) -> subprocess.Popen[bytes]:
    """nginx with sockets that listen already, so that it can be asked at once. Raises CalledProcessError."""
    command: list[Path | str] = [REPOSITORY / "scripts" / "deployment" / "nginx", "-c", settings]
    subprocess.run([*command, "-q", "-t"], check=True)
    environment = os.environ | {"NGINX": "".join(f"{number};" for number in sockets)}
    return subprocess.Popen(command, env=environment, pass_fds=sockets)
