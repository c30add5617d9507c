"""tanh(x) in OpenAI Triton: the interpreter has none, and that of the hardware rounds to eleven bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x) of float32, with a relative error below 4e-7. The polynomial near zero is that of Cephes' tanhf."""
    square = x * x
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = p * square * x + x
    # One and minus one where the power, of e^2x, is infinite or zero.
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, far)
