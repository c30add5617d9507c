"""The GPU's operators as torch's dispatcher calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from multilora_kernels import operators
from multilora_kernels.gpu_operators import gpu_operator


@functools.cache
def register_gpu_operators(dispatch_key: str) -> bool:
    """Make them the operators of a dispatch key, "CUDA", or in the interpreter "CPU"; always True."""
    operators.implement(dispatch_key, *map(_chosen, ("lora_shrink", "lora_expand", "lora_apply")))
    names = ("paged_attention", "rotary_attention", "sample_tokens")
    operators.implement_plain(dispatch_key, **{name: _chosen(name) for name in names})
    return True


def _chosen(name: str) -> Callable[..., Any]:
    """Whatever function serves an operator when it is called."""

    def serve(*arguments: Any) -> Any:
        return gpu_operator(name)(*arguments)

    return serve
