"""`decoder_layers` and `decoder_logits`: the layers of a Llama-like decoder, without or with its head, in one call.

A decode step of a small model on a CPU is hundreds of short operators, and the time between them counts. Every layer's
weights pass through the caches, so Python's code and objects have left the caches when Python runs again. And threads
that wait for longer than some microseconds go to sleep. In one call, the threads stay together until the last layer is
done, and the layers' objects are read once, as a `PackedDecoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from multilora_kernels.attention import PagedSequences
from multilora_kernels.cpu import compiled_kernels, compiled_library
from multilora_kernels.linear import PackedWeight
from multilora_kernels.panels import Panels
from multilora_kernels.quantized import QuantizedWeight
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


class PackedLayerLinear(NamedTuple):
    """A linear of a layer: the arguments of `lora_linear`, with the panels of its packed weight."""

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
        """The linear with this weight, which must be packed."""
        return cls(_panels(weight), bias, first_slice, slice_sizes)


class PackedLayer(NamedTuple):
    """The weights of one layer, and the eps of its norms.

    attention_norm, mlp_norm: [hidden_size] float32.
    qkv: a linear from hidden_size to the sizes of queries, keys and values.
    o: a linear from the size of queries to hidden_size.
    gate_up: a linear from hidden_size to twice the inner size. down: a linear from the inner size to hidden_size.
    """

    attention_norm: torch.Tensor
    qkv: PackedLayerLinear
    o: PackedLayerLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLayerLinear
    down: PackedLayerLinear
    eps: float


class PackedHead(NamedTuple):
    """The norm after the last layer, and the head.

    norm: [hidden_size] float32. panels: the panels of a packed weight from hidden_size to vocab_size.
    """

    norm: torch.Tensor
    eps: float
    panels: Panels
    vocab_size: int

    @classmethod
    def of(cls, norm: torch.Tensor, eps: float, weight: PackedWeight | QuantizedWeight) -> PackedHead:
        """The head with this weight, which must be packed."""
        return cls(norm, eps, _panels(weight), weight.shape[0])


class PackedDecoder:
    """The weights of a decoder, read once for all steps. The tensors must stay where they are.

    layers: each layer with the index of its `LayerStep` in a step's list. head: None if only `decoder_layers` runs.
    """

    def __init__(self, layers: Sequence[tuple[PackedLayer, int]], head: PackedHead | None = None) -> None:
        self.has_head = head is not None
        library = compiled_library() if all(layer.attention_norm.device.type == "cpu" for layer, _ in layers) else None
        self.read = None if library is None else library.read_decoder(tuple(layers), head)
        """The decoder in the form of compiled kernels; None on a GPU, and without compiled kernels."""


class LayerStep(NamedTuple):
    """The arguments of `rotary_attention` and `lora_linear` that several layers of a step share.

    scale, may_round: as in `AttentionOptions`; the scale is head_dim ** -0.5. tables, segments: None for a step without
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
    decoder: PackedDecoder,
    steps: tuple[LayerStep, ...],
    cache: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    update: torch.Tensor,
    on_layer: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute for each layer x += update; x += attention(norm(x)); update = mlp(norm(x)); then x and update.

    The results have the bits of the single operators: `add_rms_norm`, `lora_linear` (`packed_linear` in a step without
    adapters; the operators of quantised weights for these), `rotary_attention` and `silu_mul`.

    cache: keys and values, [num_layers, ...]; each layer's as `rotary_attention` takes them, written in place.
    x, update: [num_tokens, hidden_size] float32.
    on_layer: called before the first layer, and before a layer that begins 10 ms or more after the last call began.
    Raises the errors of on_layer, and RuntimeError for shapes that do not fit and for slots outside the cache.
    Returns None and does nothing on a GPU, and without compiled kernels.
    """
    if decoder.read is None:
        return None
    return compiled_kernels().decoder_layers(decoder.read, steps, *cache, on_layer, x, update)  # type: ignore[no-any-return]


def decoder_logits(
    decoder: PackedDecoder,
    steps: tuple[LayerStep, ...],
    cache: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    rows: torch.Tensor | None,
    on_layer: Callable[[], object] = lambda: None,
) -> torch.Tensor | None:
    """`decoder_layers` with an update of zeros, then norm(x + update) times the head's weight for some rows.

    The results have the bits of `decoder_layers`, then `add_rms_norm`, then `packed_linear` or `quantized_linear`.

    decoder: must have a head. rows: int64, the rows of x that need logits; None for all.
    Returns [len(rows), vocab_size] float32; None where `decoder_layers` returns None.
    Raises IndexError for a row that x does not have, and the errors of `decoder_layers`.
    """
    assert decoder.has_head
    if decoder.read is None:
        return None
    return compiled_kernels().decoder_logits(decoder.read, steps, *cache, on_layer, x, rows)  # type: ignore[no-any-return]


def _panels(weight: PackedWeight | QuantizedWeight) -> Panels:
    assert weight.is_packed
    return weight.panels if isinstance(weight, QuantizedWeight) else weight.data
