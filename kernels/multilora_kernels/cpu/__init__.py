"""The CPU operators: C++ compiled once per machine (`build.py`), or the reference where there is no compiler.

The widest instructions of the processor are used; `MULTILORA_CPU_CAPABILITY` = avx512, avx2 or default picks others.
"""

from __future__ import annotations

import functools
import logging

import torch

from multilora_kernels import operators, reference
from multilora_kernels.cpu.build import BuildError, load_library

logger = logging.getLogger(__name__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def load_cpu_kernels() -> bool:
    """Register the CPU operators; True when they are the compiled ones, False when the reference serves.

    Every operator calls it on its first use. Call it at startup to keep the build (half a minute, once per machine) out
    of the first request. Why the reference serves is said in one warning.
    """
    return _register()


@functools.cache
def _register() -> bool:
    try:
        library = load_library()
    except BuildError as error:
        logger.warning("No compiled CPU LoRA kernels, so the slow reference serves: %s", error)
        operators.implement("CPU", reference.lora_shrink, reference.lora_expand)
        return False
    logger.info("CPU LoRA kernels: %s from %s", torch.ops.multilora.cpu_capability(), library)
    return True
