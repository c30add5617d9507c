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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Installed:
    """The wheels in an environment of their own. outside: a folder without a clone near it, and the user's home."""

    programs: Path
    outside: Path

    def install(self, *requirements: str | Path) -> None:
        subprocess.run([self.programs / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)

    def environment(self) -> dict[str, str]:
        """No compiler is found by it, only bash, by which Triton's Python backend starts models."""
        tools = self.outside / "tools"
        tools.mkdir(exist_ok=True)
        if not (tools / "bash").exists():
            (tools / "bash").symlink_to(shutil.which("bash") or "bash")
        return {"PATH": f"{self.programs}{os.pathsep}{tools}", "HOME": str(self.outside)}  # no kernels of before

    def torch_version(self) -> str:
        ask = [self.programs / "python", "-c", "import torch; print(torch.__version__)"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()

    def check_it_serves(self, model: Path) -> None:
        """An adapter answers, and the log names the wheel's own library."""
        command = [self.programs / "multilora-serve", "--model", model, "--http-port=0", "--grpc-port=0"]
        command += ["--metrics-port=0", "--log-verbose", "--set=kv_cache_memory_bytes=384MiB"]
        with serving(command, self.outside, self.environment()) as (grpc, lines):
            ask: list[str | Path] = [self.programs / "multilora", "generate", "--chat", "What do bees make?"]
            ask += ["--url", f"grpc://{grpc}", "--adapter", REPOSITORY / "adapters" / "json"]
            answer = subprocess.run(ask, cwd=self.outside, env=self.environment(), capture_output=True, text=True)
            assert answer.stdout.startswith('{"answer": "Honey"'), answer.stdout + answer.stderr
        place = str(self.programs.parent)
        assert any("CPU kernels" in line and place in line and "/prebuilt/" in line for line in lines), "".join(lines)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheels")
    wheels = [build_wheel(name, folder / "dist", is_binary=name == "kernels") for name in DISTRIBUTIONS]
    venv.create(folder / "environment", with_pip=True)
    installed = Installed(folder / "environment" / "bin", folder / "outside")
    installed.outside.mkdir()
    client, kernels, engine = wheels
    pins = ("-c", REPOSITORY / "constraints.txt")
    installed.install(*pins, client, kernels, f"{engine}[serve]")
    installed.install(*pins, "--no-deps", "nvidia-pytriton")
    return installed


@pytest.mark.long(reason="installs torch and everything else into an environment of its own, and starts a server there")
def test_installed_wheels_serve_adapters_without_the_clone_and_a_compiler(
    installed: Installed, default_model_dir: Path
) -> None:
    installed.check_it_serves(default_model_dir)


@pytest.mark.long(reason="installs a second release of torch with its libraries of CUDA, and starts a server")
def test_the_same_library_serves_with_the_oldest_torch_that_the_wheel_allows(
    installed: Installed, default_model_dir: Path
) -> None:
    oldest = oldest_torch()
    installed.install(f"torch=={oldest}")  # Without the pins: it wants an older triton, among others.
    assert installed.torch_version().partition("+")[0] == oldest
    installed.check_it_serves(default_model_dir)


def oldest_torch() -> str:
    """The first release that the metadata of the kernels' wheel allows."""
    settings = tomllib.loads((REPOSITORY / "kernels" / "pyproject.toml").read_text())
    (least,) = [text.removeprefix("torch>=") for text in settings["project"]["dependencies"] if "torch" in text]
    return f"{least}.0"
