"""How fast this machine multiplies right now, as the yardstick of its other computations."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.machine_limits import onednn_linear, seconds_of
from benchmarks.plain_loops import DOT_ROUNDS, PlainLoops

_SIZE = 512
"""Rows and columns: a product of some milliseconds on one core, at nine tenths or more of its registers' rate."""


def matrix_rate(seconds: float = 0.03) -> float:
    """Float32 operations a second that all of torch's threads reach together, each with matrix products of its own.

    One product that all threads share is no steady yardstick: its parts are equal, so it waits for the slowest core. On
    a virtual machine a core gives half its rate for seconds or minutes whenever a neighbour uses the other half of the
    physical one, which neither load nor stolen time shows: the shared product fell from 410 to 170 GFLOP/s while two
    such cores still did 320. It is also a matter of some milliseconds, which a waking thread or one other process can
    double; and over weights that are not packed, or through MKL on AMD's processors, it takes a tenth to twice longer.
    Here oneDNN multiplies packed weights, and every core counts for its own work in the same stretch of time. Where
    plain loops of multiplications are faster than that, their rate is the yardstick.
    """
    num_threads = torch.get_num_threads()
    matrix = torch.randn(_SIZE, _SIZE)
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _SIZE)
    start = threading.Barrier(num_threads)

    def rate() -> float:
        torch.set_num_threads(1)
        with torch.inference_mode():
            onednn_linear(matrix, packed)
            start.wait()
            started, num_products = time.perf_counter(), 0
            while (passed := time.perf_counter() - started) < seconds:
                onednn_linear(matrix, packed)
                num_products += 1
        return num_products * 2 * _SIZE**3 / passed

    with ThreadPoolExecutor(num_threads) as threads:
        rates = [future.result() for future in [threads.submit(rate) for _ in range(num_threads)]]
    torch.set_num_threads(num_threads)
    return max(sum(rates), _loop_rate())


def _loop_rate() -> float:
    loops = PlainLoops()
    passed = seconds_of(lambda: loops.multiply(torch.float32, DOT_ROUNDS))
    return DOT_ROUNDS * loops.operations(torch.float32) * torch.get_num_threads() / passed
