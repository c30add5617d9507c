"""TLS over the wire: the real tritonserver, our client and command, and the OpenAI front."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from support.certificates import Authority, Identity
from typer.testing import CliRunner

from multilora_client import AsyncClient, Client, ServerUnreachable, Tls
from multilora_client.cli import app
from multilora_engine.tritonserver import ServerOptions, ServerProcess

REPOSITORY = Path(__file__).parents[3]
DECLARATIONS = REPOSITORY / "model_repository" / "generation_unary" / "config.pbtxt"
ADAPTER = REPOSITORY / "adapters" / "pirate"
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = {"text_output": [[b"Ahoy"]], "finish_reason": [[b"stop"]]}
        tensors = [pb_utils.Tensor(name, np.array(value, dtype=object)) for name, value in said.items()]
        return [pb_utils.InferenceResponse(tensors) for _ in requests]
"""
"""`generation_unary` as clients see it, with one answer to everything."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def identity(authority: Authority) -> Identity:
    return authority.sign("server")


@pytest.fixture(scope="module")
def repository(folder: Path) -> Path:
    version = folder / "repository" / "generation_unary" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    shutil.copy(DECLARATIONS, version.parent)
    return folder / "repository"


@contextmanager
def serve(repository: Path, identity: Identity, client_ca: Path | None = None) -> Iterator[ServerProcess]:
    options = ServerOptions(
        model_repository=repository,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        grpc_certificate=identity.certificate,
        grpc_key=identity.key,
        grpc_client_ca=client_ca,
    )
    with ServerProcess(options, probe=lambda url: ask(f"http://{url}")) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def address(repository: Path, identity: Identity) -> Iterator[str]:
    with serve(repository, identity) as server:
        yield server.grpc_url


@pytest.fixture(scope="module")
def mutual_address(repository: Path, identity: Identity, authority: Authority) -> Iterator[str]:
    """Of a server that asks its clients for certificates."""
    with serve(repository, identity, authority.ca) as server:
        yield server.grpc_url


def ask(url: str, tls: Tls | None = None) -> str:
    with Client(url, tls=tls) as client:
        return client.generate("Who are you?", max_tokens=1, timeout_s=20).text


async def ask_asyncio(url: str, tls: Tls | None) -> str:
    async with AsyncClient(url, tls=tls) as client:
        return (await client.generate("Who are you?", max_tokens=1, timeout_s=20)).text


def test_a_client_that_trusts_the_authority_is_answered(address: str, authority: Authority) -> None:
    tls = Tls(ca=authority.ca)
    assert ask(f"grpcs://{address}", tls) == "Ahoy"
    assert asyncio.run(ask_asyncio(f"grpcs://{address}", tls)) == "Ahoy"


def test_a_client_that_does_not_know_the_authority_does_not_talk_to_the_server(address: str) -> None:
    with pytest.raises(ServerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        ask(f"grpcs://{address}")


@pytest.mark.parametrize("door", ["address", "mutual_address"])
def test_plain_text_is_refused(request: pytest.FixtureRequest, door: str) -> None:
    with pytest.raises(ServerUnreachable):
        ask(f"grpc://{request.getfixturevalue(door)}")


def test_where_clients_need_a_certificate_only_those_with_one_are_answered(
    mutual_address: str, authority: Authority, tmp_path: Path
) -> None:
    known, stranger = authority.sign("client"), Authority(tmp_path).sign("stranger")
    url = f"grpcs://{mutual_address}"
    assert ask(url, Tls(ca=authority.ca, certificate=known.certificate, key=known.key)) == "Ahoy"
    for tls in (
        Tls(ca=authority.ca),
        Tls(ca=authority.ca, certificate=stranger.certificate, key=stranger.key),
    ):
        with pytest.raises(ServerUnreachable):
            ask(url, tls)


def test_the_command_takes_the_same_files(mutual_address: str, authority: Authority) -> None:
    client = authority.sign("command")
    environment = {"MULTILORA_CLIENT_CERTIFICATE": str(client.certificate), "MULTILORA_CLIENT_KEY": str(client.key)}
    arguments = ["generate", "Who are you?", "--url", f"grpcs://{mutual_address}"]
    answered = CliRunner().invoke(app, ["--ca", str(authority.ca), *arguments], env=environment)
    assert (answered.exit_code, answered.stdout) == (0, "Ahoy\n")
    refused = CliRunner().invoke(app, ["--ca", str(authority.ca), *arguments])
    assert refused.exit_code == 1
    assert "no server answers" in refused.stderr


@contextmanager
def openai_front(address: str, ca: Path, identity: Identity) -> Iterator[str]:
    """The command `multilora openai`; yields `host:port`."""
    command = [sys.executable, "-c", "from multilora_client.cli import main; main()", "--ca", ca, "openai"]
    command += ["--url", f"grpcs://{address}", "--port", "0"]
    command += ["--certificate", identity.certificate, "--key", identity.key]
    # With adapters of its own it asks for none of the server's.
    command += ["--adapter", f"pirate={ADAPTER}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        started = next(match for line in process.stderr if (match := re.search(r"serving https://([^/\s]+)", line)))
        try:
            yield started[1]
        finally:
            process.terminate()


def test_the_openai_front_speaks_tls_to_both_sides(address: str, authority: Authority, identity: Identity) -> None:
    body = {"model": "base", "prompt": "Who are you?", "max_tokens": 1}
    with openai_front(address, authority.ca, identity) as front:
        with httpx2.Client(verify=ssl.create_default_context(cafile=authority.ca)) as user:
            answer = user.post(f"https://{front}/v1/completions", json=body, timeout=20).json()
        assert answer["choices"][0]["text"] == "Ahoy"
        with httpx2.Client() as stranger:
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                stranger.get(f"https://{front}/v1/models")
            with pytest.raises(httpx2.TransportError):
                stranger.get(f"http://{front}/v1/models")
