"""The CPU operators: C++ compiled once per machine (`build.py`), or the reference where there is no compiler.

The widest instructions of the processor are used: amx (avx512, and a matrix unit for linears of bfloat16 weights),
avx512_bf16 (avx512, and dot products for linears in bfloat16, of codes too, where they are quick), avx512, avx2 or
default; `MULTILORA_CPU_CAPABILITY` picks others.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Literal

import torch

from multilora_kernels.cpu.build import BuildError, load_library
from multilora_kernels.interpreter import IS_INTERPRETED

logger = logging.getLogger(__name__)


def load_cpu_kernels() -> bool:
    """Build and load the compiled operators; False where the reference serves, or Triton's interpreter.

    Every operator loads them on its first use. Call it at startup to keep the build (some minutes, once per machine)
    out of the first request. One warning says why the reference serves.
    """
    return compiled_library() is not None


def compiled_library() -> ModuleType | None:
    """The compiled operators (`python.cpp`) by their names, for plain CPU tensors; None where nothing is compiled.

    They raise TypeError for other arguments, and RuntimeError for shapes and dtypes that do not fit.
    """
    return _library()


def compiled_kernels() -> ModuleType:
    """`compiled_library` where it is known to be there, as it is beside packed weights."""
    library = _library()
    assert library is not None, "no CPU kernels are compiled"
    return library


def panel_shape() -> tuple[int, int] | None:
    """Columns of one panel of packed weights (`linear.py`), and outputs of a column; None where nothing is compiled."""
    library = _library()
    return None if library is None else library.panel_shape()


def panels_are_tiles(dtype: torch.dtype, in_features: int) -> bool:
    """Whether a matrix unit multiplies weights of such a type and width here, so that their panels are its tiles.

    Only where `panel_shape` is not None.
    """
    return compiled_kernels().panels_are_tiles(_name(dtype), in_features)  # type: ignore[no-any-return]


def rounds_activations(dtype: torch.dtype, in_features: int) -> bool:
    """Whether linears of such weights are quicker here with activations that are rounded to bfloat16.

    Then their panels are pairs of inputs. Only where `panel_shape` is not None.
    """
    return compiled_kernels().rounds_activations(_name(dtype), in_features)  # type: ignore[no-any-return]


def rounds_activations_of_codes(dtype: torch.dtype, group_size: int, in_features: int) -> bool:
    """The same for codes of a dtype in groups; then their panels are for products of pairs."""
    return compiled_kernels().rounds_activations_of_codes(_name(dtype), group_size, in_features)  # type: ignore[no-any-return]


def activation_digits(dtype: torch.dtype, group_size: int, in_features: int, may_round: bool) -> int:
    """Digits of the integers that activations become beside codes of a dtype in groups; 0 where they stay floats.

    may_round: to 15 bits, two digits of 8 or one of 16; else three digits of 8 are as exact as float32, or it is 0.
    """
    return compiled_kernels().activation_digits(_name(dtype), group_size, in_features, may_round)  # type: ignore[no-any-return]


def quantize_compiled(matrix: Literal["a", "b"], values: torch.Tensor, arena: torch.dtype) -> torch.Tensor | None:
    """The codes of an adapter's A or B (`adapter_quantization.py`); None where nothing is compiled.

    values: float32 and finite, on the CPU. arena: the dtype of an arena of such codes.
    """
    library = _library()
    if library is None:
        return None
    quantize = getattr(library, f"quantize_lora_{matrix}")
    return quantize(values.contiguous(), _name(arena))  # type: ignore[no-any-return]


def forget_adapters() -> None:
    """Let go of the tables and segments of the last call, which are kept for the next one, and so of their arena."""
    library = _library() if _library.cache_info().currsize else None
    if library is not None:
        library.forget_adapters()


def capability() -> str:
    """The instruction set that serves this process. Only where `panel_shape` is not None."""
    return compiled_kernels().capability()  # type: ignore[no-any-return]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _library() -> ModuleType | None:
    if IS_INTERPRETED:
        return None
    try:
        library = load_library()
    except BuildError as error:
        logger.warning(
            "No compiled CPU kernels, so the slow reference serves adapters and torch the linears: %s", error
        )
        return None
    logger.info("CPU kernels: %s from %s", library.capability(), library.__file__)
    return library
