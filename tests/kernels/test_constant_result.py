from __future__ import annotations

import subprocess
import sys


def test_the_operators_are_imported_without_torchs_compiler() -> None:
    program = "import sys, multilora_kernels; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
