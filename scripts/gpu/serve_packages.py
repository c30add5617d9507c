"""The first step of `scripts/gpu_serve`: packages over this machine's torch, and whether tritonserver starts with them.

`python -m gpu.serve_packages ROWS WORK [BUNDLE]`, with nothing but Python, makes a virtual environment in WORK and
unpacks a bundle of `scripts/gpu_bundle` into it. What is missing is named, and ends nothing: later steps do without.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

from gpu.report import missing_tools
from repository import REPOSITORY

PACKAGES, KERNELS, REPOSITORY_PART = "packages", "cpu_kernels", "repository"
"""Parts of a bundle: the folder of wheels, the compiled C++ operators, the tracked files of this repository."""

NEEDED = (
    *("torch", "triton", "numpy", "msgspec", "pydantic", "zmq", "blake3", "llguidance", "safetensors", "tokenizers"),
    *("transformers", "huggingface_hub", "fsspec", "jinja2", "typer", "rich", "grpc", "google.protobuf"),
    *("tritonclient", "httpx2", "pytriton"),
)
"""The modules that a server and its clients import, and tritonserver."""

SOURCES = ("scripts", "kernels", "backend_src", "client")
STICKY_ERROR = "import gpu.sticky_error"
"""A line of the environment's .pth: the engine of this environment can be broken from outside, and no other."""

_START_SECONDS = 10


def python_of(work: Path) -> Path:
    """The Python of the environment."""
    return work / "venv" / "bin" / "python3"


def make_environment(work: Path) -> Path:
    """A virtual environment over all packages of this Python, and over this repository. Its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", work / "venv"], check=True)
    (packages,) = (work / "venv" / "lib").glob("python3*/site-packages")
    of_machine = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # After the environment's own packages, so that those of the bundle come first; a .pth in them counts, too.
    lines = [str(REPOSITORY / source) for source in SOURCES]
    lines += [STICKY_ERROR, *(f"import site; site.addsitedir({path!r})" for path in of_machine)]
    (packages / "multilora.pth").write_text("".join(f"{line}\n" for line in lines))
    return packages


def unpack(bundle: Path, packages: Path, kernels: Path) -> int:
    """Unpack a bundle's packages and its C++ operators; the number of packages."""
    with tarfile.open(bundle) as archive, ThreadPoolExecutor() as threads:
        parts = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        contents = {name: file.read() for name, file in parts.items() if file is not None}
        places = {name: packages for name in contents if name.startswith(f"{PACKAGES}/")}
        places[f"{KERNELS}.tar.xz"] = kernels
        list(threads.map(lambda item: _unpack_part(contents[item[0]], item[1]), places.items()))
        return len(places) - 1


def _unpack_part(content: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content))) as archive:
        archive.extractall(folder, filter="tar")


_FIND = """
import importlib.util, sys
def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(*(name for name in sys.argv[1:] if not is_there(name)))
"""


def missing_modules(python: Path) -> list[str]:
    """The modules that this Python would not find."""
    done = subprocess.run([python, "-c", _FIND, *NEEDED], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
_MODEL_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_BOOL dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_BOOL dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""


def check_tritonserver(folder: Path) -> float:
    """Seconds until a tritonserver with a model of two lines is ready. Raises ConfigError or TimeoutError, with why.

    For the environment's Python.
    """
    from multilora_engine.tritonserver.arguments import resolve_addresses
    from multilora_engine.tritonserver.installation import (
        check_free_space,
        check_programs,
        find_installation,
        make_backend_directory,
        server_environment,
    )

    environment = server_environment({})
    check_programs(environment)
    check_free_space()
    (model := folder / "models" / "empty" / "1").mkdir(parents=True)
    (model / "model.py").write_text(_MODEL)
    (model.parent / "config.pbtxt").write_text(_MODEL_CONFIG)
    installation, addresses = find_installation(), resolve_addresses("127.0.0.1", 0, 0, 0)
    ports = {"http": addresses.http_port, "grpc": addresses.grpc_port, "metrics": addresses.metrics_port}
    command = [str(installation.executable), f"--model-repository={folder / 'models'}"]
    command += [f"--{name}-port={port}" for name, port in ports.items()]
    command += [f"--{name}-address=127.0.0.1" for name in ports]
    if installation.python_backend:
        command.append(f"--backend-directory={make_backend_directory(installation, folder / 'backends')}")
    started, log = time.monotonic(), folder / "log"
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as server:
        try:
            while server.poll() is None and time.monotonic() < started + _START_SECONDS:
                with contextlib.suppress(OSError), urlopen(f"http://{addresses.http_url}/v2/health/ready", timeout=1):
                    return time.monotonic() - started
                time.sleep(0.05)
        finally:
            server.kill()
    ended = "is not ready" if server.returncode == -signal.SIGKILL else f"ended with status {server.returncode}"
    last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    raise TimeoutError(f"tritonserver {ended} after {time.monotonic() - started:.0f} s: {last}")


def rows(work: Path, bundle: Path | None) -> Iterator[dict[str, object]]:
    """What the report says of this step, as `gpu.machine.Row`, whose module needs torch."""
    started = time.monotonic()
    packages = make_environment(work)
    num_packages = unpack(bundle, packages, work / KERNELS) if bundle else 0
    yield _row(f"packages of {bundle.name if bundle else 'this machine alone'}", num_packages)
    yield _row("environment", time.monotonic() - started, "s", note=str(packages))
    missing = [*missing_modules(python_of(work)), *missing_tools()]
    yield _row("missing", note=", ".join(missing) or "nothing")
    shutil.rmtree(work / CHECK, ignore_errors=True)
    check = [str(python_of(work)), "-m", "gpu.serve_packages", CHECK, str(work / CHECK)]
    done = subprocess.run(check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode == 0:
        yield _row(TRITONSERVER, float(done.stdout.split()[-1]), "s", note="starts")
    else:
        yield _row(TRITONSERVER, note=f"MISSING: {done.stdout.strip().splitlines()[-1]}")


def _row(what: str, value: float | None = None, unit: str = "", note: str = "") -> dict[str, object]:
    return {"what": what, "value": value, "unit": unit, "of_limit": None, "note": note}


TRITONSERVER, CHECK = "tritonserver", "check"
"""The row that has a value where the server starts; the program's argument that tries it."""


if __name__ == "__main__":
    if sys.argv[1] == CHECK:
        print(check_tritonserver(Path(sys.argv[2])))
    else:
        with Path(sys.argv[1]).open("a") as file:
            for row in rows(Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None):
                file.write(json.dumps(row) + "\n")
                file.flush()
