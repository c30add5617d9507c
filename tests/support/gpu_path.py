"""The GPU path of the engine on CPU tensors, without a GPU.

Its kernels are noted where Triton would launch them, and do not run. torch's operators do.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.batch import transfer
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import pack_adapter
from multilora_engine.sampling import sampler
from multilora_kernels import cpu, cuda, interpreter, linear
from support.adapters import wire_adapter
from support.plain_operators import PLAIN_OPERATORS

NUM_LAYERS = 2
_RANKS = (3, 8)
_WAITING = {
    *("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"),
    *("aten::_unique2", "aten::repeat_interleave"),
}
"""Operators whose result, or its size, the host waits for."""
_FLOAT32_PRODUCTS = (torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out)
"""Products of matrices of 16 bits in float32, which torch has on a GPU only."""


class FakeDevice(TorchDispatchMode):
    """A mode under which operators of this package launch GPU kernels.

    launches: of kernels by name, and of torch's operators that compute. variants: the kernels that Triton would have
    compiled. copies: between host and device, and the host's waits, those inside operators of torch among them. order:
    of the launches, a name and the keyword arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.variants: set[tuple[Any, ...]] = set()
        self.copies: Counter[str] = Counter()
        self.order: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        compute = _float32_product if func in _FLOAT32_PRODUCTS else func
        result = compute(*args, **kwargs or {})
        if func.name().partition(".")[0] in _WAITING:
            self.copies["wait"] += 1
        if _computes(func, args, result):
            self._note(func.name().partition(".")[0])
        return result

    def _note(self, name: str, **options: Any) -> None:
        self.launches[name] += 1
        self.order.append((name, options))

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on CPU tensors are served as those of a GPU are, and copied as if they were elsewhere."""

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._note(kernel.__name__, **kwargs)
            self.variants.add(_variant(kernel, args, kwargs))

        def copied(direction: str) -> Callable[..., torch.Tensor]:
            def copy(tensor: torch.Tensor, *_: torch.device) -> torch.Tensor:
                self.copies[direction] += 1
                return tensor

            return copy

        class Event:
            def synchronize(_event) -> None:
                self.copies["wait"] += 1

        monkeypatch.setattr(interpreter, "IS_INTERPRETED", True)
        monkeypatch.setattr(JITFunction, "run", launch)
        monkeypatch.setattr(linear, "_sums_into_float32", lambda x: True)
        # As for logits that are not on the host.
        monkeypatch.setattr(sampler, "most_probable", lambda logits: (logits.argmax(dim=-1), False))
        monkeypatch.setattr(sampler, "_sees_no_overflow", lambda logits, token_ids: False)
        # Kernels that do not run leave any numbers behind.
        monkeypatch.setattr(sampler, "_overflown", lambda probes: set())
        monkeypatch.setattr(transfer, "is_apart", lambda device: True)
        monkeypatch.setattr(transfer, "_sent", copied("to the device"))
        monkeypatch.setattr(transfer, "_fetched", copied("from the device"))
        monkeypatch.setattr(transfer, "_recorded_event", Event)


def copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to and from the host have memory of their own, as those of a GPU: graphs write over their results."""

    class Event:
        def synchronize(_event) -> None:
            pass

    monkeypatch.setattr(transfer, "is_apart", lambda device: True)
    monkeypatch.setattr(transfer, "_sent", lambda tensor, device: tensor.clone())
    monkeypatch.setattr(transfer, "_fetched", torch.clone)
    monkeypatch.setattr(transfer, "_recorded_event", Event)


def make_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Without compiled CPU kernels in this process while the test runs. It serves from `serve` on."""
    monkeypatch.setattr(cpu, "_library", functools.cache(lambda: None))
    return FakeDevice()


def kernels_by_plain_torch(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device whose kernels plain functions stand for, so that it computes rightly. CPU tensors are on it."""
    device = make_device(monkeypatch)
    monkeypatch.setattr(interpreter, "IS_INTERPRETED", True)
    for name, function in PLAIN_OPERATORS.items():
        monkeypatch.setattr(cuda, name, function)
    return device


def make_engine(folder: Path, tokenizer: Path, save: Callable[..., Path] = save_tiny_llama, **options: Any) -> Engine:
    """A tiny one in bfloat16, with adapters 0 and 1 on all of its linears. save: writes its checkpoint."""
    config = EngineConfig(
        model_path=save(folder, num_hidden_layers=NUM_LAYERS),
        tokenizer_path=tokenizer,
        device="cpu",
        dtype="bfloat16",
        kv_cache_memory_bytes=1 << 20,  # type: ignore[arg-type]
        **options,
    )
    engine = Engine(config)
    layout = engine.info.adapter_layout
    for task, rank in enumerate(_RANKS):
        rows = [(module.module_id, module.layer, rank) for module in layout.sites.plain_modules]
        wire = wire_adapter(layout, rows, seed=task, scale=0.5)
        engine.put_adapter(task, pack_adapter(wire.weights, wire.config, layout))
    return engine


def _float32_product(
    x: torch.Tensor, matrix: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    assert x.dtype == matrix.dtype
    y = (x.double() @ matrix.double()).to(dtype)
    return y if out is None else out.copy_(y)


def _computes(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operator writes memory: not if it gives a view, its argument itself, or memory as it is."""
    if func.name().startswith(("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::detach")):
        return False
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
        return True
    results = result if isinstance(result, tuple | list) else [result]
    known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
    return any(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known for x in results)


def _variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: its constants and options, the types of its arguments, and of those that are
    specialised whether they are 1 or multiples of sixteen.
    """
    names = [param.name for param in kernel.params]
    values = dict(zip(names, args, strict=False)) | kwargs
    kinds = [_kind(values[param.name], param) for param in kernel.params]
    options = sorted((name, value) for name, value in values.items() if name not in names)
    return kernel.__name__, *kinds, *options


def _kind(value: Any, param: Any) -> Any:
    if param.is_constexpr or value is None:
        return value
    if isinstance(value, float):
        return "float"
    address = value.data_ptr() if isinstance(value, torch.Tensor) else value
    kind = value.dtype if isinstance(value, torch.Tensor) else "int64" if abs(value) >= 1 << 31 else "int32"
    return (kind,) if param.do_not_specialize else (kind, address % 16 == 0, address == 1)
