from __future__ import annotations

import re
from pathlib import Path

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver import ServerOptions
from multilora_engine.tritonserver.arguments import hardening_arguments


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """A server that knows one option, as its help says."""
    path = tmp_path / "tritonserver"
    path.write_text("#!/bin/sh\necho '  --http-max-input-size <integer>' >&2\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    (tmp_path / "file.pem").touch()
    return tmp_path / "file.pem"


def test_apis_that_change_the_server_are_closed_by_a_secret_of_its_own(executable: Path) -> None:
    secrets = set()
    for _ in range(2):
        http, grpc = hardening_arguments(ServerOptions(), executable)[:2]
        match = re.fullmatch(
            r"--http-restricted-api=shared-memory,model-repository,logging,trace:multilora-closed=([0-9a-f]{32})", http
        )
        assert match is not None
        assert grpc == http.replace("--http-restricted-api", "--grpc-restricted-protocol")
        secrets.add(match[1])
    assert len(secrets) == 2


def test_shared_memory_is_opened_on_demand_and_nothing_else(executable: Path) -> None:
    arguments = hardening_arguments(ServerOptions(shared_memory_api=True), executable)
    assert arguments[0].startswith("--http-restricted-api=model-repository,logging,trace:")


def test_tls_with_and_without_certificates_of_clients(executable: Path, pem: Path) -> None:
    tls = hardening_arguments(ServerOptions(grpc_certificate=pem, grpc_key=pem), executable)
    assert {"--grpc-use-ssl=1", f"--grpc-server-cert={pem}", f"--grpc-server-key={pem}"} <= set(tls)
    mutual = hardening_arguments(ServerOptions(grpc_certificate=pem, grpc_key=pem, grpc_client_ca=pem), executable)
    assert {"--grpc-use-ssl-mutual=1", f"--grpc-root-cert={pem}"} <= set(mutual)


@pytest.mark.parametrize("given", ["grpc_certificate", "grpc_key", "grpc_client_ca"])
def test_half_of_tls_is_refused(executable: Path, pem: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="give both --grpc-certificate and --grpc-key"):
        hardening_arguments(ServerOptions(**{given: pem}), executable)  # type: ignore[arg-type]


def test_tls_for_grpc_without_http_is_refused_because_the_canary_has_no_certificate(
    executable: Path, pem: Path
) -> None:
    with pytest.raises(ConfigError, match="--no-http leaves gRPC to the canary"):
        hardening_arguments(ServerOptions(grpc_certificate=pem, grpc_key=pem, has_http=False), executable)


def test_a_missing_pem_file_is_named(executable: Path, pem: Path) -> None:
    with pytest.raises(ConfigError, match="/nowhere is not a file"):
        hardening_arguments(ServerOptions(grpc_certificate=pem, grpc_key=Path("/nowhere")), executable)


def test_the_size_of_requests_is_limited_where_the_server_can(executable: Path) -> None:
    options = ServerOptions(max_http_bytes=1000)
    assert "--http-max-input-size=1000" in hardening_arguments(options, executable)
    executable.write_text("#!/bin/sh\necho '  --http-port <integer>' >&2\n")
    with pytest.raises(ConfigError, match="this tritonserver has no --http-max-input-size"):
        hardening_arguments(options, executable)
