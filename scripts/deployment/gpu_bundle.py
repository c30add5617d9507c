"""Packs what a machine with a GPU and without a network lacks to serve: packages, tritonserver, this repository.

One archive, in which each part is an archive of its own (`NAME.tar.xz`), so that parts unpack at once and each one's
size is known. The packages are those that the engine and the client need, in the versions of this environment, which
are the pinned ones; torch, triton and NumPy are that machine's own. Beside them lie the C++ operators, compiled.
"""

from __future__ import annotations

import importlib.metadata
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.progress import track

from deployment.build_release import DISTRIBUTIONS, add_prebuilt, copy_tracked
from gpu.serve_packages import KERNELS, PACKAGES, REPOSITORY_PART
from marked_tables import console_table

MOST_BYTES = 60 << 20
TRITONSERVER = "nvidia-pytriton"

_ROOTS = ("multilora-engine[serve]", "multilora-client")
_OF_THE_MACHINE = ("torch", "triton", "numpy")
_NEEDLESS = {("hf-xet", "")}
"""Packages, with their extras, that nothing imports there: no hub is reached."""

_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(35, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")
"""Of wheels that run where glibc is 2.35, as tritonserver's does; pip takes each for itself alone."""

console = Console(stderr=True, highlight=False)


def main(
    output: Annotated[Path, typer.Option(help="The archive to write.")],
    python: Annotated[str, typer.Option(help="Version of the Python that will serve.")] = "3.12",
    without: Annotated[
        list[str], typer.Option(help=f"Leave out a package that the machine has, or `{REPOSITORY_PART}`; repeat.")
    ] = [],  # noqa: B006
) -> None:
    """Write the bundle for a machine with Linux on x86-64, glibc 2.35 or later, and this Python."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        needed = {package.partition("==")[0]: package for package in needed_packages(python)}
        if unknown := [name for name in without if name not in {*needed, REPOSITORY_PART}]:
            raise typer.BadParameter(
                f"the bundle has no {', '.join(unknown)}; it has {', '.join(needed)} and {REPOSITORY_PART}",
                param_hint="--without",
            )
        with console.status("downloading"):
            wheels = download([needed[name] for name in needed if name not in without], python, folder / "wheels")
        own = [part for part in own_parts(folder) if part.name not in without]
        sources = [*unpacked(wheels, python, folder / PACKAGES), *own]
        with ThreadPoolExecutor() as threads:
            packing = threads.map(lambda source: packed(source, folder), sources)
            parts = list(track(packing, "packing", len(sources), console=console, transient=True))
        sizes = {part.relative_to(folder).as_posix(): part.stat().st_size for part in parts}
        console.print(console_table(("part", "MiB"), size_rows(sizes), numbers=(1,)))
        if sum(sizes.values()) > MOST_BYTES:
            raise SystemExit(f"the bundle would have {sum(sizes.values()) >> 20} MiB, more than {MOST_BYTES >> 20}")
        output.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(output, "w") as archive:
            for part in parts:
                archive.add(part, part.relative_to(folder))


def needed_packages(python: str) -> list[str]:
    """`NAME==VERSION` of all that the engine and the client need beside what the machine has, as they are here."""
    environment = {name: str(value) for name, value in default_environment().items()}
    environment |= {"python_version": python, "python_full_version": f"{python}.0"}
    waiting = [Requirement(root) for root in _ROOTS]
    seen: set[tuple[str, str]] = set()
    versions = {TRITONSERVER: importlib.metadata.version(TRITONSERVER)}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen | _NEEDLESS or name in _OF_THE_MACHINE:
                continue
            seen.add((name, extra))
            versions[name] = importlib.metadata.version(name)
            of_extra = environment | {"extra": extra}
            needs = map(Requirement, importlib.metadata.requires(name) or ())
            waiting += [need for need in needs if need.marker is None or need.marker.evaluate(of_extra)]
    own = {canonicalize_name(f"multilora-{name}") for name in ("client", "engine", "kernels")}
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in own]


def download(packages: Iterable[str], python: str, folder: Path) -> list[Path]:
    """The wheels of packages, for another Python than this one. Raises subprocess.CalledProcessError."""
    platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    subprocess.run([*pip, f"--dest={folder}", *packages], check=True)
    return sorted(folder.iterdir())


def unpacked(wheels: Iterable[Path], python: str, folder: Path) -> Iterator[Path]:
    """A folder for each wheel, with its files as they lie in site-packages."""
    for wheel in wheels:
        target = folder / wheel.name.split("-")[0]
        with zipfile.ZipFile(wheel) as files:
            for file in files.infolist():
                if (place := _place(file.filename)) and not _is_for_others(place, python):
                    (target / place).parent.mkdir(parents=True, exist_ok=True)
                    (target / place).write_bytes(files.read(file))
                    (target / place).chmod(0o755 if file.external_attr >> 16 & 0o100 else 0o644)
        yield target


def _place(name: str) -> str:
    """Where a file of a wheel lies below site-packages; empty for a folder, and for a program or header."""
    if name.endswith("/") or ".data/" not in name:
        return "" if name.endswith("/") else name
    _, _, inside = name.partition(".data/")
    scheme, _, place = inside.partition("/")
    return place if scheme in ("purelib", "platlib") else ""


def _is_for_others(place: str, python: str) -> bool:
    """Whether a file of tritonserver's wheel is a stub for another Python, or a library for such a stub alone."""
    if "/python_backend_stubs/" in place:
        return f"/{python}/" not in place
    return place.startswith("nvidia_pytriton.libs/libpython") and not place.endswith(f".{python.split('.')[1]}.so.1.0")


def own_parts(folder: Path) -> list[Path]:
    """This repository's tracked files, and the C++ operators, compiled."""
    tracked = copy_tracked((".",), folder / REPOSITORY_PART)
    kernels = copy_tracked(DISTRIBUTIONS, folder / "build") / "kernels"
    add_prebuilt(kernels)
    return [tracked, (kernels / "multilora_kernels" / "cpu" / "prebuilt").rename(folder / KERNELS)]


_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 7}]
"""Most bytes are programs for x86-64."""


def packed(source: Path, folder: Path) -> Path:
    """The archive of a folder, beside it."""
    target = source.with_name(f"{source.name}.tar.xz")
    with lzma.open(target, "wb", filters=_FILTERS) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for path in sorted(source.iterdir()):
            archive.add(path, path.name)
    return target


def size_rows(sizes: dict[str, int]) -> list[tuple[str, str]]:
    """The parts of more than half a MiB, the largest first, the others together, and the sum."""
    large = sorted((item for item in sizes.items() if item[1] >= 1 << 19), key=lambda item: -item[1])
    rest = sum(sizes.values()) - sum(size for _, size in large)
    rows = [*large, (f"{len(sizes) - len(large)} smaller ones", rest), ("all", sum(sizes.values()))]
    return [(name.removesuffix(".tar.xz"), f"{size / (1 << 20):.1f}") for name, size in rows]
