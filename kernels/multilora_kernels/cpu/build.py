"""Compile the C++ operators once and keep the library in the user's cache.

The library's folder is named by a digest of everything that makes it: sources, flags, Python, torch, processor. It is
compiled in a temporary folder under a file lock and moved into place whole, so that concurrent processes build once and
a killed build leaves nothing half-done. `python -m multilora_kernels.cpu` builds it ahead, for images. A wheel has one
already, in the folder `prebuilt`, which serves the Python and the torch that it was made with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MULTILORA_KERNELS_CACHE"
"""Environment variable: the folder of compiled libraries, instead of `~/.cache/multilora/kernels`."""

_NAME = "multilora_cpu"
_FOLDER = Path(__file__).parent
PREBUILT = _FOLDER / "prebuilt"
"""The libraries of a wheel, in folders as those of the cache."""
# -fopenmp only when compiling: at run time the OpenMP of torch is used, with torch's pool and number of threads.
_FLAGS = ["-O3", "-fopenmp", "-fno-math-errno"]


class BuildError(RuntimeError):
    """The C++ operators could not be compiled or loaded; the message holds the compiler's output."""


def load_library() -> ModuleType:
    """Load the compiled operators into torch, compiling them first if this machine has not. Raises `BuildError`.

    Loading registers the operators; the module holds the functions that Python calls directly (`python.cpp`).
    """
    try:
        place = Path(_digest()) / f"{_NAME}.so"
        if (PREBUILT / place).exists():
            return _load(PREBUILT / place)
        library = _cache_folder() / place
        if not library.exists():
            _build_once(library)
        return _load(library)
    except (OSError, RuntimeError, ImportError) as error:
        raise BuildError(str(error)) from error


def needs_compiler() -> bool:
    """Whether `load_library` would compile, and there is no compiler for it."""
    place = Path(_digest()) / f"{_NAME}.so"
    is_there = (PREBUILT / place).exists() or (_cache_folder() / place).exists()
    return not is_there and shutil.which(os.environ.get("CXX") or "c++") is None


def _build_once(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock")):
        if not library.exists():
            _build(library)


def _load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(library: Path) -> None:
    # Here only: it imports setuptools, which takes every start a quarter of a second.
    from torch.utils import cpp_extension

    logger.info("Compiling the CPU kernels into %s: once per machine, some minutes of processor time", library.parent)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _tools_on_path():
        cpp_extension.load(
            name=_NAME,
            sources=[str(path) for path in sorted(_FOLDER.glob("*.cpp"))],
            extra_cflags=_FLAGS,
            build_directory=folder,
            is_python_module=False,
        )
        (Path(folder) / library.name).replace(library)
    logger.info("Compiled the CPU kernels in %.0f s", time.monotonic() - start)


def _cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multilora" / "kernels"
    return Path(os.environ.get(CACHE_VARIABLE) or default)


def _digest() -> str:
    torch_release = torch.__version__.partition("+")[0]  # its builds for CPUs and for CUDA have the same interface
    made_for = (sys.implementation.cache_tag, torch_release, platform.machine(), _FLAGS)
    digest = hashlib.sha256(repr(made_for).encode())
    for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _tools_on_path() -> Iterator[None]:
    """ninja lies beside the interpreter, which is on PATH only in an activated environment."""
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path
