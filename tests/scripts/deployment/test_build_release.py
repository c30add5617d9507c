"""Wheels have what their users need: the model repository, compiled operators, one version."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from deployment import build_release
from deployment.build_release import DISTRIBUTIONS
from repository import REPOSITORY

LIBRARY = Path("multilora_kernels/cpu/prebuilt/0123456789abcdef/multilora_cpu.so")
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


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release whose kernels are not compiled."""

    def pretend(source: Path) -> None:
        (source / LIBRARY).parent.mkdir(parents=True)
        (source / LIBRARY).write_bytes(b"library")

    folder = tmp_path_factory.mktemp("release") / "dist"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_release, "add_prebuilt", pretend)
        build_release.build_release(folder)
    return folder


def packed(release: Path, pattern: str) -> dict[str, bytes]:
    """The files in a wheel."""
    (wheel,) = release.glob(pattern)
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


@pytest.mark.parametrize("folder", ["model_repository", "adapters"])
def test_the_engines_wheel_has_the_model_repository_and_the_sample_adapters(release: Path, folder: str) -> None:
    prefix = f"multilora_engine/{folder}/"
    files = packed(release, "multilora_engine-*-py3-none-any.whl")
    found = {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY / folder, capture_output=True, text=True).stdout.split()
    wanted = [name for name in listed if not name.startswith("data/") and name != "README.md"]
    assert found == {name: (REPOSITORY / folder / name).read_bytes() for name in wanted}


def test_the_kernels_wheel_has_a_library_and_is_for_this_machine_and_its_pythons(release: Path) -> None:
    assert packed(release, "multilora_kernels-*-cp311-abi3-linux_x86_64.whl")[str(LIBRARY)] == b"library"


def test_a_release_tells_its_changes_its_commit_and_its_files(release: Path) -> None:
    version = build_release.released_version()
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    listed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert listed | {"SHA256SUMS"} == {file.name for file in release.iterdir()}
    with tarfile.open(release / f"multilora-{version}.tar.gz") as source:
        assert f"multilora-{version}/scripts/quickstart" in source.getnames()
    notes = (release / "NOTES.md").read_text()
    assert "The first version: what [README.md](README.md) says." in notes
    assert build_release.git("rev-parse", "HEAD") in notes


def test_pip_takes_the_releases_own_wheels_of_its_requirements(release: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path / "installed")]
    done = subprocess.run([*pip, "-r", release / "requirements.txt"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {path.name.partition("-")[0] for path in (tmp_path / "installed").glob("*.dist-info")}
    assert found == {"multilora_client", "multilora_kernels", "multilora_engine"}


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="exists; remove it"):
        build_release.main(tmp_path)


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
    build_release.build_release(folder / "dist")
    venv.create(folder / "environment", with_pip=True)
    installed = Installed(folder / "environment" / "bin", folder / "outside")
    installed.outside.mkdir()
    installed.install("-r", folder / "dist" / "requirements.txt")
    return installed


@pytest.mark.long(reason="installs torch and everything else into an environment of its own, and starts a server there")
def test_installed_wheels_serve_adapters_without_the_clone_and_a_compiler(
    installed: Installed, default_model_dir: Path
) -> None:
    installed.check_it_serves(default_model_dir)


@pytest.mark.long(reason="installs torch and everything else into an environment of its own, and starts a server there")
def test_an_installed_release_shows_what_the_clone_shows(installed: Installed, default_model_dir: Path) -> None:
    cache = {"MULTILORA_CACHE": str(default_model_dir.parents[1])}
    command = [installed.programs / "multilora-quickstart", "--once", "--free-ports"]
    environment = installed.environment() | cache
    done = subprocess.run(command, cwd=installed.outside, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for sign in ("pirate (rank 4)", "judge: emoji", "4 in one batch", "NOT_FOUND: LoRA task 404"):
        assert sign in done.stdout


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
