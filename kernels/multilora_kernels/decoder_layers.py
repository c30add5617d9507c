"""`decoder_layers`: the layers of a Llama-like decoder in one call.

A decode step of a small model on a CPU is hundreds of short operators, and the time between them counts: Python's code
and objects have left the caches whenever it runs again, because every layer's weights pass through them, and threads
that wait for longer than some microseconds go to sleep. Here they stay together until the last layer is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from multilora_kernels.attention import PagedSequences
from multilora_kernels.cpu import decoder_layers_directly
from multilora_kernels.linear import PackedWeight
from multilora_kernels.panels import Panels
from multilora_kernels.quantized import QuantizedWeight
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


class PackedLayerLinear(NamedTuple):
    """A linear of a layer: arguments of `lora_linear`, with the panels of a weight that `is_packed`."""

    panels: Panels
    bias: torch.Tensor | None
    first_slice: int
    slice_sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        weight: PackedWeight | QuantizedWeight,
        bias: torch.Tensor | None,
        first_slice: int,
        slice_sizes: tuple[int, ...],
    ) -> PackedLayerLinear:
        """The same with a weight, which must be packed."""
        assert weight.is_packed
        panels = weight.panels if isinstance(weight, QuantizedWeight) else weight.data
        return cls(panels, bias, first_slice, slice_sizes)


class PackedLayer(NamedTuple):
    """The weights of one layer, and eps of its norms.

    attention_norm, mlp_norm: [hidden_size] float32. qkv: hidden_size to the sizes of queries, keys and values; o: from
    that of queries to hidden_size; gate_up: hidden_size to twice the size that down takes back to hidden_size.
    """

    attention_norm: torch.Tensor
    qkv: PackedLayerLinear
    o: PackedLayerLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLayerLinear
    down: PackedLayerLinear
    eps: float


class LayerStep(NamedTuple):
    """The arguments that all layers of a step share: those of `rotary_attention` and `lora_linear`.

    scale, may_round: of `AttentionOptions`, the scale head_dim ** -0.5. tables, segments: None for a step without
    adapters.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    sequences: PagedSequences
    scale: float
    may_round: bool
    tables: LoRATables | None
    segments: LoRASegments | None


def decoder_layers(
    layers: list[tuple[PackedLayer, torch.Tensor, torch.Tensor, LayerStep]],
    x: torch.Tensor,
    update: torch.Tensor,
    on_layer: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute for each layer x += update; x += attention(norm(x)); update = mlp(norm(x)); then x and update.

    Bit for bit the results of `add_rms_norm`, `lora_linear` (`packed_linear` in a step without adapters; for quantised
    weights their own), `rotary_attention` and `silu_mul` one by one.

    layers: the weights, keys, values and step of each; keys, values: as for `rotary_attention`, written in place.
    x, update: [num_tokens, hidden_size] float32. on_layer: called before each layer.
    Raises the errors of on_layer, and RuntimeError as its operators do, for shapes that do not fit and slots that are
    none. None, with nothing done, where those are needed: on anything but compiled kernels and plain CPU tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    return decoder_layers_directly(layers, x, update, on_layer)
