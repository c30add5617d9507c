"""A certificate authority for one test, and what it has signed; made by the command `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


@dataclass(frozen=True)
class Identity:
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._self = self._make("authority", "-addext", "basicConstraints=critical,CA:TRUE")
        self.ca = self._self.certificate

    def sign(self, name: str) -> Identity:
        return self._make(
            name,
            *("-addext", "basicConstraints=CA:FALSE", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-CA", str(self._self.certificate), "-CAkey", str(self._self.key)),
        )

    def _make(self, name: str, *options: str) -> Identity:
        identity = Identity(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        files = ("-out", str(identity.certificate), "-keyout", str(identity.key))
        command = ["openssl", "req", "-x509", *_KEY, "-subj", f"/CN={name}", *files, *options]
        subprocess.run(command, check=True, capture_output=True)
        return identity
