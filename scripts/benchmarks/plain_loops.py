"""The rates at which all cores load and multiply in loops of nothing else: a limit that no library's product flatters.

Libraries reach 40 to 90 % of what a processor's instructions allow, by processor and type, so a ratio to their products
says little about what is left.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from repository import REPOSITORY

DOT_ROUNDS = 5_000_000
"""Some ten milliseconds of a core's dot products."""

_SOURCE = REPOSITORY / "scripts" / "benchmarks" / "plain_loops.cpp"
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-std=c++17")
PAUSES = (0, 2, 4)
"""Multiplications between two lines that a core loads: the number that is quickest depends on the processor."""

_FACTOR = 0.5
"""Accumulators stay near 2: numbers too small for a float32 would be slower."""

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}


class PlainLoops:
    """The compiled loops, on as many threads as torch has when they are called."""

    def __init__(self) -> None:
        self._library = _compiled()

    def operations(self, dtype: torch.dtype) -> int:
        """The operations of one round on one core; 0 where the processor has no such instruction."""
        return int(getattr(self._library, f"operations_{_NAMES[dtype]}")()) if dtype in _NAMES else 0

    def multiply(self, dtype: torch.dtype, rounds: int) -> list[float]:
        """`rounds` of dot products of `dtype` on each core, from registers. The sum of each core's accumulators."""
        loop = getattr(self._library, f"multiply_{_NAMES[dtype]}")
        return _on_all_cores(lambda _: loop(ctypes.c_int64(rounds), ctypes.c_float(_FACTOR)))

    def load(self, values: torch.Tensor, pause: int = 0) -> float:
        """The sum of float32 `values`, of which each core reads its part, a multiple of 128 numbers.

        pause: between two lines of memory, one of PAUSES.
        """
        parts = values.chunk(torch.get_num_threads())

        def load_part(i: int) -> float:
            place, count = ctypes.c_void_p(parts[i].data_ptr()), ctypes.c_int64(len(parts[i]))
            if pause == 0:
                return float(self._library.load(place, count))
            return float(self._library.load_slowly(place, count, ctypes.c_int64(pause)))

        return sum(_on_all_cores(load_part))


def _on_all_cores(task: Callable[[int], float]) -> list[float]:
    """The task's results. Each thread gets its number, and starts when all are there."""
    num_threads = torch.get_num_threads()
    start = threading.Barrier(num_threads)

    def run(i: int) -> float:
        start.wait()
        return task(i)

    return list(_threads(num_threads).map(run, range(num_threads)))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


@functools.cache
def _compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "plain_loops.so"
        subprocess.run(["c++", *_FLAGS, "-o", library, _SOURCE], check=True)
        loops = ctypes.CDLL(str(library))
    for name in _NAMES.values():
        getattr(loops, f"operations_{name}").restype = ctypes.c_int64
        getattr(loops, f"multiply_{name}").restype = ctypes.c_double
    loops.load.restype = loops.load_slowly.restype = ctypes.c_double
    return loops
