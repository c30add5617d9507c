"""Programmatic dependent launch, from sm_90 on: programs of a kernel take their places while those of the kernel before
it in the stream still run, and wait there. So the time of a launch is hidden.

A dependent kernel waits in its first statement, before it reads or writes any memory, until all that the stream was
given before is done and can be seen (`griddepcontrol.wait` of the PTX ISA). That is right whatever kernel came before,
and whatever kernels that one waited for: all programs of each wait. No dependent kernel comes where streams join, of
which CUDA's guide says nothing. What it says nothing of and may come, a copy before one, the trial has.

The kernel before says in its first statement that dependents may begin. They do when all its programs have said so,
that is when its last ones have their places: a waiting program takes no place from one that works. Without the word
they begin when all programs have ended, and little is hidden.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from multilora_kernels.cuda.block_sizes import capability
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.streams import beside, capture_graph

_logger = logging.getLogger(__name__)

LEAST_CAPABILITY = 90

_LENGTH, _BLOCK, _TURNS = 1 << 13, 1 << 10, 1 << 10
"""Of the trial: few programs, so that those of two kernels run at once, each longer than a launch takes."""


def dependent_constants(is_on: bool) -> dict[str, Any]:
    """The constant and the option of a kernel that depends on the one before it. is_on: of `launches_dependently`."""
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_on else {"IS_DEPENDENT": False}


@functools.cache
def launches_dependently(device: torch.device) -> bool:
    """Whether kernels are launched so on a device: from sm_90 on, if a trial gives the right result. Logs why not.

    The first call makes the trial, outside of captures and of `noted_kernels`.
    """
    if capability(device) < LEAST_CAPABILITY:
        return False
    try:
        reason = _fault_of_trial(device)
    except Exception as error:  # of the compiler, the capture, the launch or the device, which have no class in common
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _logger.warning(
            "no kernel begins before the one before it has ended, which is slower: a trial failed: %s", reason
        )
    return not reason


def _fault_of_trial(device: torch.device) -> str:
    """What is wrong with dependent launches, one by one and in a captured graph; empty if nothing is.

    They come after a copy, after one another, beside a second stream, and after a kernel of torch. Each writes at its
    end what the next one reads, over what the one before has read.
    """
    start, x, y = torch.zeros(3, _LENGTH, dtype=torch.int32, device=device)
    zero = start.new_zeros(1)

    def link(source: torch.Tensor, target: torch.Tensor) -> None:
        constants = dependent_constants(True) | {"LAUNCHES_DEPENDENTS": True, "BLOCK": _BLOCK}
        link_kernel[(cdiv(_LENGTH, _BLOCK),)](source, target, zero, _TURNS, **constants)

    def run() -> None:
        x.copy_(start)
        link(x, y)
        link(y, x)
        z, _ = beside(lambda: x + 1, lambda: link(x, y), device)
        torch.add(y, z, out=x)
        link(x, y)

    replay = capture_graph(run)
    for number, again in enumerate((run, replay, replay, replay)):
        start.fill_(number)
        again()
        if not torch.equal(y, 2 * start + 7):
            return f"kernels that were {'launched' if again is run else 'captured'} did not wait for one another"
    return ""


@triton.jit
def link_kernel(
    x_ptr,
    y_ptr,
    zero_ptr,
    num_turns,
    IS_DEPENDENT: tl.constexpr,
    LAUNCHES_DEPENDENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x + 1, some time after x is read: as long as it takes to read a zero so many times, one after another."""
    if IS_DEPENDENT:
        gdc_wait()
    if LAUNCHES_DEPENDENTS:
        gdc_launch_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    zero = 0
    for _ in range(num_turns):
        zero = tl.load(zero_ptr + zero)
    tl.store(y_ptr + places, x + zero + 1)
