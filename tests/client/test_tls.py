"""Settings that are refused before anything is sent; tests/engine/tritonserver/test_tls.py speaks TLS to the real
server.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certificates import Authority
from typer.testing import CliRunner

from multilora_client import AsyncClient, Client, InvalidRequest, Tls
from multilora_client.cli import app


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_tls_to_an_address_in_plain_text_is_refused(kind: type[Client | AsyncClient], scheme: str) -> None:
    with pytest.raises(InvalidRequest, match=f"with TLS write {scheme}s://host:1"):
        kind(f"{scheme}://host:1", tls=Tls())


def test_half_of_a_clients_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="give both or neither"):
        Tls(key=tmp_path / "key.pem")


def test_files_that_are_no_certificates_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("hello")
    identity = Authority(tmp_path).sign("client")
    with pytest.raises(InvalidRequest, match=r"text\.pem"):
        Tls(ca=tmp_path / "text.pem")
    with pytest.raises(InvalidRequest, match=r"nowhere\.pem"):
        Tls(ca=tmp_path / "nowhere.pem")
    with pytest.raises(InvalidRequest, match=r"client\.pem"):
        Tls(certificate=identity.certificate, key=Authority(tmp_path).sign("other").key)


def test_the_command_says_in_one_line_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--ca", str(tmp_path / "nowhere.pem"), "generate", "hi"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "nowhere.pem" in result.stderr


def test_the_openai_front_needs_both_files() -> None:
    result = CliRunner().invoke(app, ["openai", "--certificate", "front.pem"])
    assert result.exit_code == 1
    assert "give both --certificate and --key" in result.stderr
