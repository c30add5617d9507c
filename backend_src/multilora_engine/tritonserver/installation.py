"""The place of a tritonserver, and the needs of its Python backend to run our models in this environment."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multilora_engine.errors import ConfigError
from multilora_engine.shared_python import PYTHON_VERSION, libpython_directory

SHARED_MEMORY = Path("/dev/shm")

_MINIMUM_FREE_BYTES = 32 << 20


def check_free_space(largest_request_bytes: int = 0) -> None:
    """Raises ConfigError when /dev/shm is too small for the stubs' regions and one request of that size.

    Without the check the first large adapter would fail instead, in a container with the usual 64 MiB.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = _MINIMUM_FREE_BYTES + largest_request_bytes
    if free < needed:
        largest = f", {largest_request_bytes >> 20} MiB of it for the largest adapter" if largest_request_bytes else ""
        raise ConfigError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free and the server needs {needed >> 20} MiB at least{largest}; "
            f"in a container give --shm-size=1g, or more, or lower max_lora_rank"
        )


_VARIABLES = {"MALLOC_ARENA_MAX": "2", "THP_MEM_ALLOC_ENABLE": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables that the environment may set otherwise.

PyTorch asks for huge pages, as the weights do by themselves, where Linux gives them on demand (its usual setting):
KV cache and adapters are read from one end to the other, and small pages end that every 4 KiB. Sixteen sequences with
as many adapters: 684 tokens a second instead of 603, 0.82 of the rate without adapters instead of 0.74.

The server has dozens of threads, and malloc gives each an arena that keeps the memory of large requests: 12,000
requests of up to 15 MB left 287 MiB, and more with every one; with two arenas 10,000 left 176 and 20,000 left 167.

NumPy's linear algebra (OpenBLAS) multiplies where DoRA's magnitudes are divided by lengths. Its other threads look for
more work for some 30 ms after each product, on the processors that the next step needs; so it has none.
"""

_OPENMP_WAITING = {"GOMP_SPINCOUNT": "1000"}
"""How long OpenMP threads look whether they may go on before they sleep, unless the environment says how they wait.

A CPU step waits hundreds of times, each time for some microseconds: being woken takes as long. But a thread that looks
uses up its share of a core, so that any other thread there gets the core when there is work again. Milliseconds of a
decode step of one and of sixteen sequences on two cores: 500 looks 17.3 and 26.7, 1000 looks 15.8 and 21.7, 2000 looks
16.1 and 23.8. Beside a process that never sleeps: never looking (OMP_WAIT_POLICY=PASSIVE) 22.2 and 34.6, 500 looks 24.4
and 40.3, 1000 looks 23.2 and 36.3 or, later, 30.3 and 44.9, 2000 looks 39.4 and 55.6. The runtime's own choice,
300,000, took ten times as long as never looking beside several processes.
"""
_OPENMP_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@dataclass(frozen=True)
class Installation:
    """A server executable. `python_backend` lists the backend's files where the server's own folder is incomplete."""

    executable: Path
    python_backend: tuple[Path, ...] = ()


def find_installation(executable: Path | None = None) -> Installation:
    """`executable`, else the server of the nvidia-pytriton wheel, else `tritonserver` on PATH. Raises ConfigError."""
    found = executable or _wheel_executable() or _executable_on_path()
    if found is None:
        raise ConfigError("there is no tritonserver: pip install --no-deps nvidia-pytriton, or give --tritonserver")
    if not os.access(found, os.X_OK):
        raise ConfigError(f"{found} is not an executable file; give --tritonserver the path of one")
    return Installation(found.absolute(), _wheel_python_backend(found.resolve().parents[1]))


def has_gpu() -> bool:
    """Whether CUDA's driver finds a GPU; without torch, which takes seconds to import."""
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False


def check_programs(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where a program that the Python backend starts for each model is not on PATH.

    environment: the server's. The backend does not notice that a model's process could not be started: it waits for
    minutes, and tells nothing.
    """
    if not shutil.which("bash", path=environment.get("PATH", os.defpath)):
        raise ConfigError(
            "bash is not on PATH, and the server's Python backend starts every model by it; install it "
            "(apt-get install bash, apk add bash, dnf install bash), or add its folder to PATH"
        )
    folder = Path(sys.executable).parent
    if not (folder / "python3").exists():
        raise ConfigError(
            f"{folder} has no python3, by which the server's Python backend finds the packages of {sys.executable}; "
            f"make it: ln -s {Path(sys.executable).name} {folder / 'python3'}"
        )


def make_backend_directory(installation: Installation, folder: Path) -> Path:
    """A backend directory of symlinks: the server wants the stub next to the backend's library, the wheel keeps them
    apart."""
    python = folder / "python"
    python.mkdir(parents=True)
    for file in installation.python_backend:
        (python / file.name).symlink_to(file)
    return folder


def server_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment plus `variables`, such that the stubs run in this Python environment.

    The stub ignores VIRTUAL_ENV and PYTHONPATH: it takes the environment of the first `python3` on PATH.
    """
    environment = engine_environment(variables)
    _prepend(environment, "PATH", Path(sys.executable).parent)
    if libpython := libpython_directory():
        _prepend(environment, "LD_LIBRARY_PATH", libpython)
    return environment


def engine_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment plus `variables`, in which an engine is at its fastest."""
    environment = {**_VARIABLES, **os.environ, **variables}
    if not any(name in environment for name in _OPENMP_CHOICES):
        environment |= _OPENMP_WAITING
    return environment


def has_flag(executable: Path, flag: str) -> bool:
    """Whether this server was built with a command line flag, by its own help, which it writes to stderr."""
    done = subprocess.run([str(executable), "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return flag in done.stdout


def _wheel_executable() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "tritonserver" / "bin" / "tritonserver"


def _executable_on_path() -> Path | None:
    found = shutil.which("tritonserver")
    return Path(found) if found else None


def _wheel_python_backend(root: Path) -> tuple[Path, ...]:
    stubs = root / "python_backend_stubs"
    if not stubs.is_dir():
        return ()
    backend = root / "backends" / "python"
    stub = stubs / PYTHON_VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        raise ConfigError(f"{root} has no Python backend for Python {PYTHON_VERSION}")
    return backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub


def _prepend(environment: dict[str, str], name: str, folder: Path) -> None:
    environment[name] = os.pathsep.join(filter(None, [str(folder), environment.get(name)]))
