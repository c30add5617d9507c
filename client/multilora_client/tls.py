"""`Tls`: the authorities that a client trusts, and the certificate that it shows to servers that ask for one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc  # type: ignore[import-untyped]

from multilora_client.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files of a client.

    ca: the authorities to trust, instead of the machine's own. certificate, key: the client's own, for servers that
    let in only clients whose certificate they know (mutual TLS). Raises InvalidRequest for half of these, and for a
    file that cannot be read or is no PEM file.

    >>> client = Client("grpcs://triton.example:8001", tls=Tls(ca=Path("ca.pem")))
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequest("a client's certificate comes with its key; give both or neither")
        # From a file that is no PEM file, gRPC makes a connection that fails for no reason.
        self.ssl_context()

    def ssl_context(self) -> ssl.SSLContext:
        """The context for HTTP."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            files = ", ".join(str(file) for file in (self.ca, self.certificate, self.key) if file is not None)
            raise InvalidRequest(f"{files}: not PEM files that belong together: {error}") from None
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The credentials for gRPC."""
        files = (self.ca, self.key, self.certificate)
        return grpc.ssl_channel_credentials(*(None if file is None else file.read_bytes() for file in files))
