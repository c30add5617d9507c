"""Kernels compiled ahead of their first launch, in processes beside each other: the launch finds Triton's files.

A first run of some work only notes which kernels it launches (`noted_kernels`), in Triton's own words for that. Then
processes compile them (`compile_ahead`). They need no device but its target, and Triton gives a kernel the same key in
`TRITON_CACHE_DIR` as at its launch.

`python -m multilora_kernels.cuda.ahead TARGET` is such a process: it reads kernels, one a line, and writes a line of
result for each.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.jit import JITFunction

from multilora_kernels.control_groups import usable_processors

_logger = logging.getLogger(__name__)

MAX_PROCESSES = 16

PROCESS_BYTES = 400 << 20
"""Of the machine's memory, for each process."""


class Ahead(NamedTuple):
    """How many kernels were compiled, found in Triton's files, and failed; and by how many processes."""

    num_compiled: int
    num_found: int
    num_failed: int
    num_processes: int


@contextmanager
def noted_kernels() -> Iterator[list[str]]:
    """Kernels that are not compiled in this process are only noted: nothing compiles or runs, and memory that they
    would write stays as it is. Each is told once, as `JITFunction.preload` takes it.
    """
    _settle_keys()
    noted: dict[str, None] = {}

    def note(*, compile: dict[str, Any], **_: Any) -> bool:
        noted[compile["specialization_data"]] = None
        return True  # Triton then goes on as if it were done.

    kernels: list[str] = []
    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        yield kernels
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        kernels += noted


def compile_ahead(
    kernels: Sequence[str],
    target: Any,
    memory: int,
    on_kernel: Callable[[int, int, str], None] = lambda done, total, kernel: None,
) -> Ahead:
    """Have kernels compiled, and wait for it. One that fails is left to its launch, which tells why.

    kernels: as `noted_kernels` tells them. target: of Triton, of the device. memory: bytes of the machine's memory
    that the processes may take; there is one process for each usable processor, if there is memory for so many.
    on_kernel: called before each kernel with how many began before, how many there are, and the name.
    """
    waiting = iter(list(enumerate(kernels)))
    num_processes = min(usable_processors(), MAX_PROCESSES, max(1, memory // PROCESS_BYTES), len(kernels))

    def work() -> list[str]:
        command = [sys.executable, "-P", "-m", __name__, json.dumps(vars(target))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        results: list[str] = []
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        except OSError as error:
            _logger.warning("a process that compiles kernels cannot be started: %s", error)
            return results
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            for number, kernel in waiting:
                name = json.loads(kernel)["name"].rpartition(".")[2]
                on_kernel(number, len(kernels), name)
                try:
                    child.stdin.write(kernel + "\n")
                    child.stdin.flush()
                except BrokenPipeError:
                    # The process has ended, and has no answer either. Later the line would be written again.
                    with suppress(BrokenPipeError):
                        child.stdin.close()
                result = child.stdout.readline().strip()
                results.append(result)
                if result not in _RESULTS:
                    _logger.warning("%s was not compiled ahead: %s", name, result or "the process has ended")
                if not result:
                    break
        return results

    with ThreadPoolExecutor(max(1, num_processes)) as threads:
        started = [threads.submit(work) for _ in range(num_processes)]
        results = [result for one in started for result in one.result()]
    num_compiled, num_found = (results.count(result) for result in _RESULTS)
    return Ahead(num_compiled, num_found, len(kernels) - num_compiled - num_found, num_processes)


_RESULTS = ("compiled", "found")


def _settle_keys() -> None:
    """Give all functions of this package their keys, in one order.

    A key has the constants of the functions that a function calls, unless these get their own later: it depends on what
    the process compiled before.
    """
    folder = str(Path(__file__).parent)
    for found in sorted(pkgutil.iter_modules([folder]), key=lambda one: one.name):
        module = importlib.import_module(f"{__package__}.{found.name}")
        for _, value in sorted(vars(module).items()):
            if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                hash(value.cache_key)


class _NoDevice:
    """A driver of Triton's that knows a target and has no device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def _serve() -> None:
    """Compile the kernels that come."""
    # Whatever a compiler prints is no result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    target = triton.backends.compiler.GPUTarget(**json.loads(sys.argv[1]))
    triton.runtime.driver.set_active(_NoDevice(target))
    _settle_keys()
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for kernel in sys.stdin:
        try:
            module, _, name = json.loads(kernel)["name"].rpartition(".")
            compiled = getattr(importlib.import_module(module), name).preload(kernel)
            _build_launcher(compiled)
            result = "found" if hits[-1] else "compiled"
        except Exception as error:  # of the compiler or the assembler, which have no class in common
            result = " ".join(f"{type(error).__name__}: {error}".split())
        results.write(result + "\n")
        results.flush()


def _build_launcher(kernel: Any) -> None:
    """The C code by which Triton up to 3.6 launches a kernel, compiled for each kind of arguments; later ones have one.

    Where that fails, as without CUDA's driver, the launch builds it, or tells why it cannot.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(Exception):
            driver.CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    _serve()
