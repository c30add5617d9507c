"""The CPU operators: C++ compiled once per machine (`build.py`), or the reference where there is no compiler.

The widest instructions of the processor are used: amx (avx512, and a matrix unit for linears of bfloat16 weights),
avx512_bf16 (avx512, and dot products for linears in bfloat16, of codes too, where they are quick), avx512, avx2 or
default; `MULTILORA_CPU_CAPABILITY` picks others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch

from multilora_kernels import operators, reference, sampling_reference
from multilora_kernels.constant_result import constant_result
from multilora_kernels.cpu.build import BuildError, load_library
from multilora_kernels.cpu.registration import register
from multilora_kernels.gpu_registration import register_gpu_operators
from multilora_kernels.interpreter import IS_INTERPRETED
from multilora_kernels.panels import Panels
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables

logger = logging.getLogger(__name__)


@constant_result
def load_cpu_kernels() -> bool:
    """Register the CPU operators; True when they are the compiled ones, False when the reference serves.

    False, too, in Triton's interpreter, where the GPU's operators serve a CPU.

    Every operator calls it on its first use. Call it at startup to keep the build (some minutes, once per machine)
    out of the first request. Why the reference serves is said in one warning.
    """
    return _library() is not None


def apply_directly(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> bool:
    """`lora_apply` past torch's dispatcher, which takes longer than the update of one row of a small model.

    False, with nothing done, where the operator is needed: under dispatch modes, functorch, autograd or the profiler,
    for tensors that are not plain CPU tensors, and where the reference serves.
    """
    library = _library()
    return library is not None and library.lora_apply(x, y, tables, first_slice, slice_sizes, segments) is not None


def segments_directly(
    token_lora_mapping: torch.Tensor, max_loras: int, chunk_size: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The tensors of `lora_segments`, in their order; None where PyTorch is needed: see `apply_directly`."""
    library = _library()
    return None if library is None else library.lora_segments(token_lora_mapping, max_loras, chunk_size, capacity)


def linear_directly(
    x: torch.Tensor,
    panels: Panels,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """`multilora::lora_linear`, or `quantized_lora_linear`, past torch's dispatcher; None where the operator is needed:
    see `apply_directly`.
    """
    library = _library()
    if library is None:
        return None
    return library.lora_linear(x, panels, tables, first_slice, slice_sizes, segments, bias)  # type: ignore[no-any-return]


def panel_shape() -> tuple[int, int] | None:
    """Columns of one panel of packed weights (`linear.py`), and outputs of a column; None where nothing is compiled."""
    library = _library()
    return None if library is None else library.panel_shape()


def panels_are_tiles(dtype: torch.dtype, in_features: int) -> bool:
    """Whether a matrix unit multiplies weights of such a type and width here, so that their panels are its tiles.

    Only where `panel_shape` is not None.
    """
    return _compiled().panels_are_tiles(_name(dtype), in_features)  # type: ignore[no-any-return]


def rounds_activations(dtype: torch.dtype, in_features: int) -> bool:
    """Whether linears of such weights are quicker here with activations that are rounded to bfloat16.

    Then their panels are pairs of inputs. Only where `panel_shape` is not None.
    """
    return _compiled().rounds_activations(_name(dtype), in_features)  # type: ignore[no-any-return]


def rounds_activations_of_codes(dtype: torch.dtype, group_size: int, in_features: int) -> bool:
    """The same for codes of a dtype in groups; then their panels are for products of pairs."""
    return _compiled().rounds_activations_of_codes(_name(dtype), group_size, in_features)  # type: ignore[no-any-return]


def activation_digits(dtype: torch.dtype, group_size: int, in_features: int, may_round: bool) -> int:
    """Digits of the integers that activations become beside codes of a dtype in groups; 0 where they stay floats.

    may_round: to 15 bits, two digits of 8 or one of 16; else three digits of 8 are as exact as float32, or it is 0.
    """
    return _compiled().activation_digits(_name(dtype), group_size, in_features, may_round)  # type: ignore[no-any-return]


def packed_linear_directly(x: torch.Tensor, panels: Panels, out_features: int) -> torch.Tensor | None:
    """`multilora::packed_linear`, or `quantized_linear`, past torch's dispatcher; None where the operator is needed:
    see `apply_directly`.
    """
    library = _library()
    return None if library is None else library.packed_linear(x, panels, out_features)


def packed_embedding_directly(token_ids: torch.Tensor, panels: Panels, num_embeddings: int) -> torch.Tensor | None:
    """`multilora::packed_embedding`, or `quantized_embedding`, past torch's dispatcher; None where the operator is
    needed: see `apply_directly`.
    """
    library = _library()
    return None if library is None else library.packed_embedding(token_ids, panels, num_embeddings)


def elementwise_directly(name: str, *arguments: object) -> Any:
    """An operator of `elementwise.py` past torch's dispatcher; None where it is needed: see `apply_directly`."""
    library = _library()
    return None if library is None else getattr(library, name)(*arguments)


def rotary_attention_directly(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    sequences: object,
    options: object,
    is_interleaved: bool,
) -> torch.Tensor | None:
    """`multilora::rotary_attention` past torch's dispatcher; None where the operator is needed: see `apply_directly`.

    sequences, options: `PagedSequences` and `AttentionOptions`, which lie above this package.
    """
    library = _library()
    if library is None:
        return None
    step = (qkv, cos, sin, keys, values, slots, sequences)
    return library.rotary_attention(*step, options, is_interleaved)  # type: ignore[no-any-return]


def sample_tokens_directly(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor | None:
    """`multilora::sample_tokens` past torch's dispatcher; None where the operator is needed: see `apply_directly`."""
    library = _library()
    return None if library is None else library.sample_tokens(logits, parameters)


def most_probable_directly(logits: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """`most_probable` of `sampling.py`; None where PyTorch is needed: see `apply_directly`."""
    library = _library()
    return None if library is None else library.most_probable(logits)


def rotary_angles_directly(
    positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`rotary_angles`; None where PyTorch is needed: see `apply_directly`."""
    library = _library()
    return None if library is None else library.rotary_angles(positions, frequencies)


def read_decoder(layers: tuple[object, ...], head: object) -> object | None:
    """The arguments of a `PackedDecoder`, which lies above this package, for the functions below; it keeps both.

    None where nothing is compiled, or where tensors are not plain CPU tensors.
    """
    library = _library()
    return None if library is None else library.read_decoder(layers, head)


def decoder_directly(name: Literal["decoder_layers", "decoder_logits"], decoder: object, *arguments: object) -> Any:
    """A function of `decoder_layers.py`; None where its operators are needed one by one: see `apply_directly`.

    decoder: of `read_decoder`. arguments: steps, keys, values, on_layer, x, and update or rows.
    """
    return getattr(_compiled(), name)(decoder, *arguments)


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
    return _compiled().capability()  # type: ignore[no-any-return]


def _compiled() -> ModuleType:
    library = _library()
    assert library is not None
    return library


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _library() -> ModuleType | None:
    if IS_INTERPRETED:
        register_gpu_operators("CPU")
        return None
    try:
        library = load_library()
    except BuildError as error:
        logger.warning(
            "No compiled CPU kernels, so the slow reference serves adapters and torch the linears: %s", error
        )
        operators.implement("CPU", reference.lora_shrink, reference.lora_expand)
        operators.implement_plain(
            "CPU",
            paged_attention=reference.paged_attention,
            rotary_attention=reference.rotary_attention,
            add_rms_norm=reference.add_rms_norm,
            add_layer_norm=reference.add_layer_norm,
            silu_mul=reference.silu_mul,
            gelu_tanh_mul=reference.gelu_tanh_mul,
            gelu_tanh=reference.gelu_tanh,
            sample_tokens=sampling_reference.sample_tokens,
        )
        return None
    register(library)
    logger.info("CPU kernels: %s from %s", library.capability(), library.__file__)
    return library
