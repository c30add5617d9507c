"""`multilora doctor`: its sentences about machines, servers and adapters that are right, and that are not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from client.conftest import SAVED_SITES
from safetensors.numpy import save_file
from support.expert_adapters import PLAIN, numbered, random_factors
from typer.testing import CliRunner, Result

from multilora_client import AdapterTensors, doctor
from multilora_client.cli import app
from multilora_wire.layout import adapter_layout
from multilora_wire.sites import decoder_sites

SERVED = {"model": "acme", "max_model_len": 64, "vocab_size": 11, "adapters": []}
NOWHERE = "grpc://127.0.0.1:1"


@pytest.fixture
def _without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip check` takes seconds; one test runs it."""
    monkeypatch.setattr(doctor, "_unmet_requirements", lambda: iter(()))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def report(**changes: Any) -> dict[str, Any]:
    layout = replace(adapter_layout(SAVED_SITES, 8, "float32"), **changes)
    return {**SERVED, "version": version("multilora-client"), "layout": asdict(layout)}


def findings(result: Result, verdict: str) -> list[str]:
    return [line[6:] for line in result.stdout.splitlines() if line[:6].strip() == verdict]


def test_an_adapter_that_fits_a_running_server(fake_triton: Any, save_adapter: Callable[..., Any]) -> None:
    fake_triton.report = report()
    adapter = save_adapter().directory
    result = run(adapter, "--url", fake_triton.url)

    works = "\n".join(findings(result, "works"))
    assert result.exit_code == 0
    assert f"The server at {fake_triton.url} serves acme (up to 64 tokens), 0 adapters" in works
    assert f"The adapter {adapter} can be read: PEFT, 14 linears" in works
    assert "The adapter fits acme" in works


@pytest.mark.usefixtures("_without_pip")
def test_an_adapter_of_a_rank_that_the_server_refuses(fake_triton: Any, save_adapter: Callable[..., Any]) -> None:
    fake_triton.report = report(max_rank=4)
    result = run(save_adapter().directory, "--url", fake_triton.url)

    assert result.exit_code == 1
    assert findings(result, "fault") == [
        "The adapter has rank 5, and the server takes 4 at most. Start the server with --max-lora-rank 5"
    ]


@pytest.mark.usefixtures("_without_pip")
def test_an_adapter_of_another_model(fake_triton: Any, save_adapter: Callable[..., Any]) -> None:
    fake_triton.report = report(sites=decoder_sites(2, 24, 40, 20, 48))
    result = run(save_adapter().directory, "--url", fake_triton.url)

    assert result.exit_code == 1
    (fault,) = findings(result, "fault")
    assert "24 inputs and 56 outputs there, 24 inputs and 48 outputs here" in fault


@pytest.mark.usefixtures("_without_pip")
def test_a_converted_adapter(fake_triton: Any, tmp_path: Path, small_tensors: AdapterTensors) -> None:
    fake_triton.report = report()
    small_tensors.save(tmp_path / "made")
    result = run(tmp_path / "made", "--url", fake_triton.url)

    assert result.exit_code == 0
    assert any("converted, 2 rows, ranks [1, 2], 0.0 MB" in text for text in findings(result, "works"))


@pytest.mark.usefixtures("_without_pip")
def test_a_directory_without_an_adapter_and_no_server(tmp_path: Path) -> None:
    result = run(tmp_path, "--url", NOWHERE)

    assert result.exit_code == 1
    (fault,) = findings(result, "fault")
    assert fault.startswith(f"The adapter {tmp_path} cannot be served: ")
    assert any(text.startswith(f"No server of multilora answers at {NOWHERE}: ") for text in findings(result, "note"))


@pytest.mark.usefixtures("_without_pip")
def test_an_adapter_that_is_read_with_its_model_alone_and_no_server(tmp_path: Path) -> None:
    """Which is no fault of the adapter."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 6}')
    save_file(numbered(random_factors(PLAIN)), tmp_path / "adapter_model.safetensors")

    result = run(tmp_path, "--url", NOWHERE)

    assert not findings(result, "fault")
    assert f"The adapter {tmp_path} cannot be read without a server. Start one, or give --url" in findings(
        result, "note"
    )


@pytest.mark.usefixtures("_without_pip")
def test_a_server_of_another_version(fake_triton: Any) -> None:
    fake_triton.report = report() | {"version": "9.9"}
    result = run("--url", fake_triton.url)

    assert any("The server has version 9.9 and this client" in text for text in findings(result, "note"))


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        taken, free = listener.getsockname()[1], closed.getsockname()[1]
        closed.close()
        monkeypatch.setattr(doctor, "_SERVER_PORTS", {taken: "HTTP", free: "gRPC"})
        (note,) = doctor.look_at_ports(is_served=False)

    assert note.verdict == "note"
    assert f"{taken} (HTTP)" in note.text
    assert str(free) not in note.text


@pytest.mark.parametrize(
    ("flags", "words", "verdict"),
    [
        ({"avx2", "fma", "f16c", "avx512f"}, "AVX2", "works"),
        ({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}, "AVX-512 with bfloat16", "works"),
        ({"sse4_2", "avx2"}, "none of the vector units", "note"),
    ],
)
def test_processors(flags: set[str], words: str, verdict: str) -> None:
    finding = doctor._look_at_processor(frozenset(flags), 2)

    assert (finding.verdict, words in finding.text) == (verdict, True)


@pytest.mark.parametrize(("num_bytes", "verdict"), [(64 << 20, "fault"), (1 << 30, "works")])
def test_the_shared_memory_of_a_container(num_bytes: int, verdict: str) -> None:
    assert doctor._look_at_shared_memory(num_bytes).verdict == verdict


def test_unmet_requirements_of_other_packages_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "foo 1 requires bar, which is not installed.\nmultilora-engine 0.1.0 requires torch>=2.11, got 2.0\n"
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda *_, **__: doctor.subprocess.CompletedProcess([], 1, printed, "")
    )

    assert [finding.text for finding in doctor._unmet_requirements()] == [
        "multilora-engine 0.1.0 requires torch>=2.11, got 2.0"
    ]
