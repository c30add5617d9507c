"""Wheels have what their users need: the model repository, compiled operators, one version."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployment import build_wheels
from deployment.build_wheels import DISTRIBUTIONS, build_wheel
from repository import REPOSITORY

COMMANDS = {"multilora": "client", "multilora-serve": "backend_src", "multilora-dynamo": "backend_src"}


def version_of(folder: str) -> str:
    settings = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())
    return str(settings["project"]["version"])


def test_the_three_have_one_version_and_the_changes_begin_with_it() -> None:
    (version,) = {version_of(folder) for folder in DISTRIBUTIONS}
    headings = re.findall(r"^## (\S+?),? ", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


@pytest.mark.parametrize(("command", "folder"), COMMANDS.items())
def test_a_command_tells_its_version(command: str, folder: str) -> None:
    said = subprocess.run([Path(sys.executable).with_name(command), "--version"], capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, f"{command} {version_of(folder)}\n"), said.stderr


def test_the_engines_wheel_has_the_model_repository(tmp_path: Path) -> None:
    wheel = build_wheel("backend_src", tmp_path, is_binary=False)
    assert wheel.name.endswith("-py3-none-any.whl")
    folder = "multilora_engine/model_repository/"
    with zipfile.ZipFile(wheel) as files:
        packed = {name.removeprefix(folder): files.read(name) for name in files.namelist() if name.startswith(folder)}
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY / "model_repository", capture_output=True, text=True)
    assert packed == {name: (REPOSITORY / "model_repository" / name).read_bytes() for name in listed.stdout.split()}


def test_the_kernels_wheel_has_a_library_and_is_for_this_machine_and_its_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path("multilora_kernels/cpu/prebuilt/0123456789abcdef/multilora_cpu.so")

    def pretend(source: Path) -> None:
        (source / place).parent.mkdir(parents=True)
        (source / place).write_bytes(b"library")

    monkeypatch.setattr(build_wheels, "add_prebuilt", pretend)
    wheel = build_wheel("kernels", tmp_path, is_binary=True)
    assert wheel.name.endswith("-cp311-abi3-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as files:
        assert files.read(str(place)) == b"library"


@contextmanager
def serving(command: list[str | Path], folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """A server that is ready: where its gRPC is, and what it has said. It must end in order."""
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        try:
            for line in server.stderr:
                lines.append(line)
                if ready := re.search(r"ready .* gRPC (\S+)", line):
                    yield ready[1], lines
                    break
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
    assert server.returncode == 0, "".join(lines)


@pytest.mark.long(reason="installs torch and everything else into an environment of its own, and starts a server there")
def test_installed_wheels_serve_adapters_without_the_clone_and_a_compiler(
    tmp_path: Path, default_model_dir: Path
) -> None:
    wheels = [build_wheel(folder, tmp_path / "dist", is_binary=folder == "kernels") for folder in DISTRIBUTIONS]
    venv.create(tmp_path / "environment", with_pip=True)
    programs = tmp_path / "environment" / "bin"
    pip: list[str | Path] = [programs / "python", "-m", "pip", "install", "--quiet"]
    pip += ["-c", REPOSITORY / "constraints.txt"]
    client, kernels, engine = wheels
    subprocess.run([*pip, client, kernels, f"{engine}[serve]"], check=True)
    subprocess.run([*pip, "--no-deps", "nvidia-pytriton"], check=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    tools = tmp_path / "tools"  # no compiler among them; Triton's Python backend starts models by bash
    tools.mkdir()
    (tools / "bash").symlink_to(shutil.which("bash") or "bash")
    environment = {"PATH": f"{programs}{os.pathsep}{tools}", "HOME": str(outside)}  # no kernels of before
    command = [programs / "multilora-serve", "--model", default_model_dir, "--http-port=0", "--grpc-port=0"]
    command += ["--metrics-port=0", "--log-verbose", "--set=kv_cache_memory_bytes=384MiB"]
    with serving(command, outside, environment) as (grpc, lines):
        ask: list[str | Path] = [programs / "multilora", "generate", "--chat", "What do bees make?"]
        ask += ["--url", f"grpc://{grpc}", "--adapter", REPOSITORY / "adapters" / "json"]
        answer = subprocess.run(ask, cwd=outside, env=environment, capture_output=True, text=True)
        assert answer.stdout.startswith('{"answer": "Honey"'), answer.stdout + answer.stderr
    assert any("CPU kernels" in line and f"{programs.parent}" in line and "/prebuilt/" in line for line in lines)
