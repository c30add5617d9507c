"""`quantization_config` as AutoGPTQ, GPTQModel, AutoAWQ, transformers' fine-grained FP8 and gpt-oss write it.

In these files a linear is quantised if it has the tensors of a quantised linear. The configuration says how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from multilora_wire.quantized.awq import AWQ
from multilora_wire.quantized.compressed import Float8, Scales
from multilora_wire.quantized.compressed_config import MAX_BITS, MIN_BITS, block_shape
from multilora_wire.quantized.fields import Object, choice, field, one_of
from multilora_wire.quantized.gptq import GPTQ
from multilora_wire.quantized.mxfp4 import MXFP4
from multilora_wire.quantized.names import ModuleClass, overrides
from multilora_wire.quantized.scheme import QuantizationError, Scheme

_BITS = ("bits", "w_bit", "wbits")
_GROUP_SIZE = ("group_size", "q_group_size")
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_TENSORS = ("qweight", "qzeros", "scales")
_REPACK = "save it again in that layout with the tool that wrote it"


@dataclass(frozen=True)
class GPTQCheckpoint:
    """`quant_method` gptq. dynamic: overrides of `bits` and `group_size` by regular expressions."""

    config: Object
    zero_offset: int
    notes: tuple[str, ...] = ()

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats."""
        return self._scheme(name) if any(map(has, _TENSORS)) else None

    def _scheme(self, name: str) -> GPTQ:
        changed = overrides(field(self.config, "dynamic", dict, {}), name)
        if changed is False:
            raise QuantizationError(f"dynamic excludes {name}, and it has a qweight")
        if changed is not None and not isinstance(changed, dict):
            raise QuantizationError(f"dynamic must hold objects, got {changed!r:.80} for {name}")
        config = {**self.config, **(changed or {})}
        bits = choice("bits", one_of(config, _BITS, int, 4), range(MIN_BITS, MAX_BITS + 1), _REPACK)
        return GPTQ(bits, _group_size(config), self.zero_offset, field(config, "desc_act", bool, False))


@dataclass(frozen=True)
class AWQCheckpoint:
    """`quant_method` awq."""

    awq: AWQ
    notes: tuple[str, ...] = ()

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats."""
        return self.awq if any(map(has, _TENSORS)) else None


@dataclass(frozen=True)
class FP8Checkpoint:
    """`quant_method` fp8. block: outputs and inputs that share a scale; None for whole tensors."""

    block: tuple[int, int] | None
    notes: tuple[str, ...]

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats."""
        scales = Scales(*(self.block or (None, None)))
        names = [scale for scale in ("weight_scale_inv", "weight_scale") if has(scale)]
        return Float8(scales, names[0]) if names else None


@dataclass(frozen=True)
class MXFP4Checkpoint:
    """`quant_method` mxfp4: of experts, whose names the names of the tensors follow after an underscore."""

    notes: tuple[str, ...] = ()

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats."""
        return MXFP4() if has("blocks") or has("scales") else None


def read_gptq(config: Object) -> GPTQCheckpoint:
    """Raises QuantizationError for schemes that are not served."""
    layout = one_of(config, ("checkpoint_format", "format"), str, "gptq")
    choice("checkpoint_format", layout, tuple(_ZERO_OFFSETS), _REPACK)
    if field(config, "is_marlin_format", bool, False):
        raise QuantizationError(f"is_marlin_format is not served; {_REPACK}")
    checkpoint = GPTQCheckpoint(config, _ZERO_OFFSETS[layout])
    choice("bits", one_of(config, _BITS, int, 4), range(MIN_BITS, MAX_BITS + 1), _REPACK)
    _group_size(config)
    field(config, "desc_act", bool, False)
    overrides(field(config, "dynamic", dict, {}), "")
    return checkpoint


def read_awq(config: Object) -> AWQCheckpoint:
    """Raises QuantizationError for schemes that are not served."""
    choice("bits", one_of(config, _BITS, int, 4), (4,), _REPACK)
    choice("version", one_of(config, ("version", "format"), str, "gemm").lower(), ("gemm",), _REPACK)
    return AWQCheckpoint(AWQ(_group_size(config), field(config, "zero_point", bool, True)))


def read_fp8(config: Object) -> FP8Checkpoint:
    """Raises QuantizationError for schemes that are not served."""
    has_blocks = config.get("weight_block_size") is not None
    scheme = field(config, "activation_scheme", str, "dynamic")
    return FP8Checkpoint(
        block_shape(config, "weight_block_size") if has_blocks else None,
        (f"activation_scheme {scheme!r:.40} is not followed: activations stay floats",),
    )


def _group_size(config: Object) -> int | None:
    size = one_of(config, _GROUP_SIZE, int, 128)
    if size == 0 or size < -1:
        raise QuantizationError(f"group_size must be positive, or -1 for whole rows, got {size}")
    return None if size == -1 else size
