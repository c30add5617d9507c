"""Arithmetic of grids and tiles on the host.

Triton's own functions of these names serve kernels, too, and take the host some ten microseconds a call.
"""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not less. number: positive."""
    return 1 << (number - 1).bit_length()
