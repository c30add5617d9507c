"""The bundle for a machine with a GPU and without a network."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
import typer.testing

from deployment import gpu_bundle
from gpu import serve_packages
from repository import REPOSITORY


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_it_has_what_a_server_and_its_clients_need_in_the_pinned_versions() -> None:
    needed = dict(package.split("==") for package in gpu_bundle.needed_packages("3.12"))
    assert {"msgspec", "pyzmq", "blake3", "llguidance", "transformers", "grpcio", "nvidia-pytriton"} <= needed.keys()
    assert not {"torch", "triton", "numpy", "multilora-engine", "gevent", "hf-xet"} & needed.keys()
    pinned = pins()
    assert {name: needed[name] for name in needed.keys() & pinned.keys()} == {
        name: pinned[name] for name in needed.keys() & pinned.keys()
    }


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
    return folder / f"{name}-1.0-py3-none-any.whl"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a bundle is made of two wheels and a library that nobody compiled."""
    stubs = "pytriton/tritonserver/python_backend_stubs"
    library = "nvidia_pytriton.libs/libpython3-419a3a08"
    wheels = [
        wheel(tmp_path, "plain", {"plain/__init__.py": b"x = 1", "plain-1.0.data/purelib/more.py": b"y = 2"}),
        wheel(
            tmp_path,
            "nvidia_pytriton",
            {f"{stubs}/3.12/stub": b"12", f"{stubs}/3.13/stub": b"13", f"{library}.13.so.1.0": b"13"},
        ),
    ]

    def own_parts(folder: Path) -> list[Path]:
        files = (f"{serve_packages.REPOSITORY_PART}/README.md", f"{serve_packages.KERNELS}/0123/multilora_cpu.so")
        for file in files:
            (folder / file).parent.mkdir(parents=True)
            (folder / file).write_bytes(b"content")
        return [folder / serve_packages.REPOSITORY_PART, folder / serve_packages.KERNELS]

    monkeypatch.setattr(gpu_bundle, "download", lambda *_: wheels)
    monkeypatch.setattr(gpu_bundle, "own_parts", own_parts)
    return tmp_path


def make(output: Path, *options: str) -> typer.testing.Result:
    app = typer.Typer()
    app.command()(gpu_bundle.main)
    return typer.testing.CliRunner().invoke(app, ["--output", str(output), *options])


def test_what_it_holds_is_unpacked_without_stubs_for_other_pythons(small: Path) -> None:
    bundle, packages, kernels = small / "bundle.tar", small / "site-packages", small / "cache"
    assert make(bundle).exit_code == 0
    assert serve_packages.unpack(bundle, packages, kernels) == 2
    found = {path.relative_to(packages).as_posix() for path in packages.rglob("*") if path.is_file()}
    stub = "pytriton/tritonserver/python_backend_stubs/3.12/stub"
    assert found == {"plain/__init__.py", "more.py", stub}
    assert (kernels / "0123" / "multilora_cpu.so").read_bytes() == b"content"
    with tarfile.open(bundle) as archive:
        assert "repository.tar.xz" in archive.getnames()


def test_parts_can_be_left_out(small: Path) -> None:
    assert make(small / "bundle.tar", "--without", "repository").exit_code == 0
    with tarfile.open(small / "bundle.tar") as archive:
        assert "repository.tar.xz" not in archive.getnames()


def test_a_part_that_it_does_not_have_cannot_be_left_out(small: Path) -> None:
    assert make(small / "bundle.tar", "--without", "msgspec").exit_code == 0
    done = make(small / "other.tar", "--without", "msgspec", "--without", "no-such")
    assert done.exit_code == 2
    assert "the bundle has no no-such; it has" in " ".join(done.output.replace("│", " ").split())
    assert not (small / "other.tar").exists()


def test_one_that_is_too_large_is_not_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "MOST_BYTES", 100)
    done = make(small / "bundle.tar")
    assert done.exit_code == 1
    assert not (small / "bundle.tar").exists()
