"""The operators under test: the CPU's, the GPU's where there is one, or the GPU's in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from support import attention_cases
from support.lora_cases import Case
from support.synthetic_batches import reference_order

from multilora_kernels import (
    AttentionOptions,
    PagedSequences,
    add_layer_norm,
    add_rms_norm,
    gelu,
    gelu_tanh,
    gelu_tanh_mul,
    lora_apply,
    lora_expand,
    lora_shrink,
    paged_attention,
    rotary_attention,
    silu_mul,
)
from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cpu.build import load_library
from multilora_kernels.expand import lora_expand_activated

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = [
    *(
        []
        if INTERPRETED or torch.cuda.is_available()
        else ["test_cuda.py", "test_cuda_quantized.py", "test_cuda_sampling.py", "test_self_test.py"]
    ),
    *([] if torch.cuda.is_available() else ["test_cuda_graph.py"]),
]


@dataclass(frozen=True)
class Implementation:
    """has_order: whether its operators take codes in the order of a GPU."""

    device: str
    has_order: bool
    lora_shrink: Callable[..., torch.Tensor]
    lora_expand: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    rotary_attention: Callable[..., torch.Tensor]
    lora_apply: Callable[..., None]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_rms_norm
    add_layer_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_layer_norm
    silu_mul: Callable[..., torch.Tensor] = silu_mul
    gelu_tanh_mul: Callable[..., torch.Tensor] = gelu_tanh_mul
    gelu_tanh: Callable[..., torch.Tensor] = gelu_tanh
    gelu: Callable[..., torch.Tensor] = gelu
    lora_expand_activated: Callable[..., torch.Tensor] = lora_expand_activated

    def place(self, case: Case) -> Case:
        """A case as the operators take it."""
        placed = case.to(self.device)
        if not self.has_order or placed.tables.arena.dtype not in CODE_BITS:
            return placed
        return replace(placed, tables=reference_order(placed.tables, torch.tensor(case.shape.slice_sizes)))

    def caches_of(self, case: attention_cases.Case) -> attention_cases.Case:
        """The case with its cache as the operators read it, on their device."""
        return (case if self.device == "cpu" and not INTERPRETED else case.as_on_a_gpu()).to(self.device)


def _paged_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *fields: Any) -> torch.Tensor:
    return paged_attention(q, keys, values, PagedSequences(*fields[:6]), AttentionOptions(*fields[6:]))


def _rotary_attention(*arguments: Any) -> torch.Tensor:
    step, fields, is_interleaved = arguments[:6], arguments[6:-1], arguments[-1]
    options = AttentionOptions(*fields[6:])
    return rotary_attention(*step, PagedSequences(*fields[:6]), options, is_interleaved)


def _implementations() -> list[str]:
    if INTERPRETED:
        return ["interpreter"]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=_implementations())
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "interpreter":
        from multilora_kernels import cuda

        names = {field.name for field in fields(Implementation)[2:]}
        return Implementation("cpu", True, **{name: getattr(cuda, name) for name in names})
    return Implementation(
        request.param,
        request.param == "cuda",
        lora_shrink,
        lora_expand,
        _paged_attention,
        _rotary_attention,
        lora_apply,
    )


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every buffer that an operator allocates without filling it is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    library = None if INTERPRETED else load_library()
    if library is not None:
        library.poison_memory(True)
    yield
    torch.use_deterministic_algorithms(False)
    if library is not None:
        library.poison_memory(False)
