"""Compile the C++ operators once and keep the library in the user's cache.

The library needs neither torch's headers nor its C++ classes, and of Python the stable interface only, so that one
serves all releases of both. Its folder is named by a digest of everything that makes it: sources, flags, processor. It
is compiled in a temporary folder under a file lock and moved into place whole, so that concurrent processes build once
and a killed build leaves nothing half-done. `python -m multilora_kernels.cpu` builds it ahead, for images. A wheel has
one already, in the folder `prebuilt`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from multilora_kernels.control_groups import usable_processors

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MULTILORA_KERNELS_CACHE"
"""Environment variable: the folder of compiled libraries, instead of `kernels` in that of all that multilora keeps:
$MULTILORA_CACHE, else $XDG_CACHE_HOME/multilora, else ~/.cache/multilora."""

_NAME = "multilora_cpu"
_FOLDER = Path(__file__).parent
PREBUILT = _FOLDER / "prebuilt"
"""The libraries of a wheel, in folders as those of the cache."""
# The oldest Python that the packages allow; a free-threaded Python has no stable interface.
_STABLE_INTERFACE = [] if sysconfig.get_config_var("Py_GIL_DISABLED") else ["-DPy_LIMITED_API=0x030B0000"]
_FLAGS = ["-std=c++20", "-fPIC", "-O3", "-fno-math-errno", *_STABLE_INTERFACE]


class BuildError(RuntimeError):
    """The C++ operators could not be compiled or loaded; the message holds the compiler's output."""


def load_library() -> ModuleType:
    """Load the compiled operators (`python.cpp`), compiling them first if this machine has not. Raises `BuildError`."""
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
    return not is_there and shutil.which(_compiler()[0]) is None


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
    logger.info("Compiling the CPU kernels into %s: once per machine, some minutes of processor time", library.parent)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        # The files that have all kernels of a vector type take longest.
        sources = sorted(_FOLDER.glob("*.cpp"), key=lambda path: b'"kernels.h"' not in path.read_bytes())
        with ThreadPoolExecutor(_jobs()) as threads:
            objects = list(threads.map(lambda source: _compile(source, Path(folder)), sources))
        made = Path(folder) / library.name
        _run_compiler("-shared", "-o", made, *objects, "-ldl")
        made.replace(library)
    logger.info("Compiled the CPU kernels in %.0f s", time.monotonic() - start)


def _compile(source: Path, folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    _run_compiler(*_FLAGS, "-I", sysconfig.get_path("include"), "-c", source, "-o", target)
    return target


def _run_compiler(*arguments: str | Path) -> None:
    done = subprocess.run([*_compiler(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, done.args))} failed:\n{done.stdout}")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def _jobs() -> int:
    """Files that are compiled at a time: MAX_JOBS, as for extensions of torch, or one a processor."""
    return int(os.environ.get("MAX_JOBS") or usable_processors())


def _cache_folder() -> Path:
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multilora"
    return Path(os.environ.get("MULTILORA_CACHE") or default) / "kernels"


def _digest() -> str:
    python = sys.implementation.cache_tag if not _STABLE_INTERFACE else sys.implementation.name
    digest = hashlib.sha256(repr((python, platform.machine(), _FLAGS)).encode())
    for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
