"""The GPU operators in Triton's interpreter: their arithmetic and masks, without a GPU.

In a process of its own, since Triton looks at the variable when it is imported. Not run there: that a token's bits do
not depend on the batch, which numpy's matrix product, standing in for the tensor cores, does not promise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
_CASES = """interpreter-7- or interpreter-10-zipf or interpreter-133-skewed or every_rank or every_hidden_size
    or every_slice_width or every_dtype or share_one_a or magnitude or keep_their_bits or wider_tensor or test_cuda
    or elementwise"""


def test_the_gpu_operators_pass_the_same_tests_in_the_interpreter():
    names = ("test_shrink.py", "test_expand.py", "test_elementwise.py", "test_cuda.py")
    tests = [str(_FOLDER / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-k", " ".join(_CASES.split()), *tests]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
