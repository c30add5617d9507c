"""The schemes by which the weights of linears are rounded, in compressed-tensors' words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC

from multilora_engine.errors import ConfigError
from multilora_engine.quantize.scales import Codes, Float8Codes, IntegerCodes

PER_OUTPUT = -1
"""The group size that means one scale for all inputs of an output."""

SCHEME_NAMES = ("w4a16", "w8a16", "fp8")
LINEAR = "Linear"
HEAD = "lm_head"


@dataclass(frozen=True)
class Scheme:
    """w4a16, w8a16: integers of 4 or 8 bits, `pack-quantized`. fp8: float8_e4m3fn, `float-quantized`.

    group_size: how many inputs share a scale, or PER_OUTPUT. None is the scheme's own: for w4a16 the largest of 128, 64
    and 32 that divides the inputs of every linear, for the others PER_OUTPUT.

    is_packed: whether integers are packed into words. Integers of 8 bits may also be stored as int8, `int-quantized`.

    fp8 is the preset FP8_DYNAMIC: a server with FP8 units also rounds activations, token by token.
    """

    name: str
    group_size: int | None = None
    is_symmetric: bool = True
    is_packed: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.name not in SCHEME_NAMES:
            raise ConfigError(f"the scheme is {self.name!r}; write one of {', '.join(SCHEME_NAMES)}")
        if self.group_size is not None and self.group_size < 1 and self.group_size != PER_OUTPUT:
            raise ConfigError(
                f"the group size is {self.group_size}; write how many inputs share a scale, or {PER_OUTPUT} for all"
            )
        if self.is_float and not self.is_symmetric:
            raise ConfigError("fp8 has no zero points; leave --asymmetric out, or use w8a16 or w4a16")
        if self.is_float and self.group_size not in (None, PER_OUTPUT):
            raise ConfigError(f"fp8 has one scale an output; leave --group-size {self.group_size} out")

    @property
    def is_float(self) -> bool:
        return self.name == "fp8"

    @property
    def codes(self) -> Codes:
        return Float8Codes() if self.is_float else IntegerCodes(self.num_bits)

    @property
    def num_bits(self) -> int:
        return 4 if self.name == "w4a16" else 8

    @property
    def format(self) -> CompressionFormat:
        if self.is_float:
            return CompressionFormat.float_quantized
        return CompressionFormat.pack_quantized if self.is_packed else CompressionFormat.int_quantized

    def describe(self) -> str:
        """For people: `w4a16, asymmetric, groups of 64`."""
        grouping = "a scale an output" if self.group_size in (None, PER_OUTPUT) else f"groups of {self.group_size}"
        return ", ".join([self.name, *([] if self.is_symmetric else ["asymmetric"]), grouping])

    def for_modules(self, target: str = LINEAR) -> QuantizationScheme:
        """The scheme in compressed-tensors' form. target: the class or the name of the modules."""
        if self.is_float:
            return QuantizationScheme(targets=[target], format=self.format, **FP8_DYNAMIC)
        assert self.group_size is not None
        weights = QuantizationArgs(num_bits=self.num_bits, symmetric=self.is_symmetric, group_size=self.group_size)
        return QuantizationScheme(targets=[target], format=self.format, weights=weights)


HEAD_OF_8_BITS = Scheme("w8a16", PER_OUTPUT)
EMBEDDINGS_OF_8_BITS = Scheme("w8a16", PER_OUTPUT, is_packed=False)
"""They are not packed, because transformers needs the embeddings' tensor `weight`."""


def quantization_config(scheme: Scheme, others: Mapping[str, Scheme | None]) -> QuantizationConfig:
    """The `quantization_config` of config.json.

    scheme: the scheme of all linears except `others`. others: the schemes of named modules; None if a module stays.
    """
    of_others = {name: other for name, other in others.items() if other is not None and other != scheme}
    formats = {scheme.format, *(other.format for other in of_others.values())}
    groups = {name.rpartition(".")[2]: other.for_modules(name) for name, other in of_others.items()}
    return QuantizationConfig(
        config_groups={"group_0": scheme.for_modules(), **groups},
        format=(scheme.format if len(formats) == 1 else CompressionFormat.mixed_precision).value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[name for name, other in others.items() if other is None],
    )
