"""The GPU operators compared with the reference on the very device that will serve: `self_test`, some seconds at start.

A compiler or a chip that we have not seen may round, order or load otherwise than ours. Whoever serves wrong tokens
does not see it, so the operators of a model's shapes are run once, on random inputs, before any request is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from multilora_kernels import penalties_reference, reference, sampling_reference
from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.adapter_quantization import reference_a, reference_b
from multilora_kernels.apply import lora_apply
from multilora_kernels.attention import AttentionOptions, PagedSequences, rotary_attention
from multilora_kernels.elementwise import add_layer_norm, add_rms_norm, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.expand import lora_expand
from multilora_kernels.kv_rows import quantize_rows
from multilora_kernels.penalties import forbid_tokens, penalise_tokens
from multilora_kernels.quantized import CodeType, QuantizedWeight, quantized_linear
from multilora_kernels.sampling import SamplingRule, sample_tokens
from multilora_kernels.segments import (
    CHUNK_SIZE,
    PREFILL_CHUNK_SIZE,
    LoRASegments,
    lora_segments,
    reference_segments,
)
from multilora_kernels.shrink import lora_shrink
from multilora_kernels.tables import LoRATables


@dataclass(frozen=True)
class OperatorShapes:
    """The shapes in which a model calls the operators.

    linears: in_features and the widths of the slices of each fused linear. mlp_size: width of an activation.
    max_rank: of adapters. contexts: keys of the sequences. num_rows: tokens of a batch with adapters. vocab_size: of
    the logits. dtype: of activations. lora_dtype: of the arena. kv_dtype: of keys and values; None is dtype.
    rotary_dim: elements of a head that turn; None is all. code_types: of quantised linears, with their group sizes.
    """

    hidden_size: int
    mlp_size: int
    linears: tuple[tuple[int, tuple[int, ...]], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_rank: int
    dtype: torch.dtype
    lora_dtype: torch.dtype
    contexts: tuple[int, ...] = (1, 17, 600, 2100)
    num_rows: int = 37
    vocab_size: int = 32000
    kv_dtype: torch.dtype | None = None
    rotary_dim: int | None = None
    code_types: tuple[tuple[CodeType, int], ...] = ()


@dataclass(frozen=True)
class CheckedOperator:
    """One comparison.

    error: the largest, in units of the tolerance, so that 1 is the most that is allowed; infinite for results that are
        no numbers.
    failure: the exception that the operator raised; empty for none.
    """

    operator: str
    shapes: str
    error: float
    seconds: float
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and self.error <= 1

    def __str__(self) -> str:
        result = self.failure or f"the largest error is {self.error:.3g} times the one that is allowed"
        return f"{self.operator} of {self.shapes}: {result}"


class OperatorFault(Exception):
    """An operator gives wrong results on this device."""


_CODED_OUTPUTS, _MANY_ROWS = 1024, 300

Results = tuple[torch.Tensor, torch.Tensor, float]
"""The results of an operator and of the reference, and the tolerance, relative to 1 + |the reference|."""

TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def self_test(shapes: OperatorShapes, device: torch.device) -> list[CheckedOperator]:
    """Compare every operator. Raises OperatorFault, which names the first operator that is wrong, and its shapes."""
    checked = []
    for one in checked_operators(shapes, device):
        if not one.is_right:
            raise OperatorFault(f"the self-test on {device_name(device)} failed: {one}")
        checked.append(one)
    return checked


def checked_operators(
    shapes: OperatorShapes, device: torch.device, first: int = 0, stride: int = 1
) -> Iterator[CheckedOperator]:
    """Every comparison, right or wrong, one by one. first, stride: for a process that makes some of them only."""
    generator = torch.Generator(device).manual_seed(0)
    for operator, described, compare in itertools.islice(_comparisons(shapes, device, generator), first, None, stride):
        started = time.perf_counter()
        try:
            error, failure = _error(*compare()), ""
        except Exception as raised:  # of the compiler, the launch or the device: whichever, the operator does not serve
            error, failure = float("inf"), f"{type(raised).__name__}: {raised}"
        yield CheckedOperator(operator, described, error, time.perf_counter() - started, failure)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _error(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    assert actual.shape == expected.shape
    errors = (actual.double() - expected.double()).abs() / (tolerance * (1 + expected.double().abs()))
    largest = float(errors.max())
    return float("inf") if largest != largest else largest


def _comparisons(
    shapes: OperatorShapes, device: torch.device, generator: torch.Generator
) -> Iterator[tuple[str, str, Callable[[], Results]]]:
    for in_features, slice_sizes in shapes.linears:
        for chunk_size in (CHUNK_SIZE, PREFILL_CHUNK_SIZE):
            batch = _LoRABatch(shapes, in_features, slice_sizes, chunk_size, device, generator)
            described = f"{in_features} inputs, outputs {slice_sizes}, {batch}"
            yield "lora_shrink", described, batch.compare_shrink
            yield "lora_expand", described, batch.compare_expand
            yield "lora_apply", described, batch.compare_apply
    yield "lora_segments", f"{shapes.num_rows} rows", partial(_compare_segments, shapes, device, generator)
    options = {
        "": AttentionOptions(),
        " soft cap": AttentionOptions(softcap=3.0),
        " sinks": AttentionOptions(sinks=torch.randn(shapes.num_heads, device=device, generator=generator)),
    }
    for name, option in options.items():
        for window, longest in itertools.product((None, shapes.block_size + 1), (1, shapes.num_rows)):
            heads = f"{shapes.num_heads} heads on {shapes.num_kv_heads} of {shapes.head_dim}"
            tokens = "one token each" if longest == 1 else f"up to {longest} tokens"
            described = f"{heads}, contexts {shapes.contexts}, {tokens}, window {window}{name}, {shapes.dtype}"
            compare = partial(_compare_attention, shapes, option, window, longest, device, generator)
            yield "rotary_attention", described, compare
    for (code_type, group_size), (in_features, slice_sizes) in itertools.product(shapes.code_types, shapes.linears):
        described = f"{in_features} inputs, {code_type.value} in groups of {group_size}, {shapes.dtype}"
        sizes = (min(sum(slice_sizes), _CODED_OUTPUTS), in_features)
        compare = partial(_compare_codes, shapes, code_type, group_size, sizes, device, generator)
        yield "quantized_linear", described, compare
    yield from _comparisons_between_linears(shapes, device, generator)


def _comparisons_between_linears(
    shapes: OperatorShapes, device: torch.device, generator: torch.Generator
) -> Iterator[tuple[str, str, Callable[[], Results]]]:
    random = partial(_random, device=device, generator=generator, dtype=shapes.dtype)
    rows, hidden, mlp = shapes.num_rows, shapes.hidden_size, shapes.mlp_size
    norms, gates = (random(rows, hidden), random(rows, hidden), random(hidden)), random(rows, 2 * mlp)
    described, tolerance = f"[{rows}, {hidden}] {shapes.dtype}", TOLERANCES[shapes.dtype]
    yield "add_rms_norm", described, lambda: _compare_norm(add_rms_norm, reference.add_rms_norm, norms, tolerance)
    biased = (*norms, random(hidden))
    yield (
        "add_layer_norm",
        described,
        lambda: _compare_norm(add_layer_norm, reference.add_layer_norm, biased, tolerance),
    )
    described = f"[{rows}, {mlp}] {shapes.dtype}"
    yield "silu_mul", described, lambda: (silu_mul(gates), reference.silu_mul(gates.double()), tolerance)
    yield "gelu_tanh_mul", described, lambda: (gelu_tanh_mul(gates), reference.gelu_tanh_mul(gates.double()), tolerance)
    ungated = gates[:, :mlp].contiguous()
    yield "gelu_tanh", described, lambda: (gelu_tanh(ungated), reference.gelu_tanh(ungated.double()), tolerance)
    logits = _random(rows, shapes.vocab_size, device=device, generator=generator, dtype=torch.float32) * 3
    described = f"[{rows}, {shapes.vocab_size}]"
    # Before the sampling, which rounds some of them.
    yield "penalise_tokens", described, lambda: _compare_penalties(logits)
    yield "forbid_tokens", described, lambda: _compare_bans(logits)
    yield "sample_tokens", described, lambda: _compare_tokens(logits)


def _compare_penalties(logits: torch.Tensor) -> Results:
    """Logits and counts behind penalties of every kind are to be the very same. Every second row is penalised."""
    num_rows, vocab = logits.shape
    columns = torch.arange(vocab, device=logits.device)
    counts = torch.where(columns % 3 == 0, columns % 11, 0).int().repeat(num_rows, 1)
    rows = torch.arange(0, num_rows, 2, device=logits.device)
    places = torch.stack([rows, rows.flip(0), rows // 2 % 2])
    last_token_ids = torch.arange(num_rows, device=logits.device) * 33 % vocab
    kinds = torch.tensor([(1.3, 0.0, 0.0), (1.0, 0.5, 0.3), (0.7, -0.2, 1 / 3)], dtype=torch.float64)
    penalties = kinds.repeat(len(rows), 1)[: len(rows)].to(logits.device)
    results = []
    for penalise in (penalise_tokens, penalties_reference.penalise_tokens):
        x, counted = logits.clone(), counts.clone()
        penalise(x, counted, places, last_token_ids, penalties)
        results.append(torch.cat((x, counted)))
    return results[0], results[1], 1e-9


def _compare_bans(logits: torch.Tensor) -> Results:
    """Of every row some tokens, of which the last one of the row lets every second be."""
    num_rows, vocab = logits.shape
    rows = torch.arange(num_rows, device=logits.device).repeat(3)
    token_ids = torch.arange(len(rows), device=logits.device) * 7 % vocab
    bans = torch.stack([rows, token_ids, token_ids % 3 - 1])
    results = []
    for forbid in (forbid_tokens, penalties_reference.forbid_tokens):
        x = logits.clone()
        forbid(x, bans, rows[:num_rows] % 2)
        results.append(x.isinf())
    return results[0], results[1], 1e-9


def _compare_tokens(logits: torch.Tensor) -> Results:
    """The tokens by rules of every kind, some of rounded logits, which are tied: they are to be the very same."""
    logits[1::2] = logits[1::2].round()
    kinds = ((0, 1.0, 0.0), (1, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02), (50, 0.7, 0.1))
    rules = [SamplingRule(0.5 + row % 3, *kinds[row % len(kinds)], row / len(logits)) for row in range(len(logits))]
    parameters = torch.tensor(rules, dtype=torch.float64, device=logits.device)
    return sample_tokens(logits, rules), sampling_reference.sample_tokens(logits, parameters), 1e-9


def _compare_norm(
    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    expected: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    tolerance: float,
) -> Results:
    eps = 1e-5
    normed, total = operator(*inputs, eps)
    # The norm is that of the sum as it is stored.
    stored, zero = total.double(), torch.zeros_like(total, dtype=torch.float64)
    expected_normed, _ = expected(stored, zero, *(tensor.double() for tensor in inputs[2:]), eps)
    expected_total = inputs[0].double() + inputs[1].double()
    return torch.cat((normed, total)), torch.cat((expected_normed, expected_total)), tolerance


def _compare_codes(
    shapes: OperatorShapes,
    code_type: CodeType,
    group_size: int,
    sizes: tuple[int, int],
    device: torch.device,
    generator: torch.Generator,
) -> Results:
    """Few rows, which are multiplied with the codes, and many, for which these become floats."""
    dtype = torch.bfloat16 if shapes.dtype == torch.float32 else shapes.dtype
    group_size = min(group_size, sizes[1])
    weight = QuantizedWeight(*sizes, code_type, group_size, dtype, device, compute_dtype=dtype)
    random = partial(torch.randint, 1 << code_type.bits, device=device, generator=generator, dtype=torch.uint8)
    # Without the codes of FP8 that are no numbers.
    codes = random(size=sizes) & (0xBF if code_type is CodeType.FP8 else 0xFF)
    num_groups = weight.num_groups
    # Results of about one, in which the rounding of a weight is small.
    spread = 1 if code_type is CodeType.FP8 else 1 << (code_type.bits - 1)
    scales = torch.rand(sizes[0], num_groups, device=device, generator=generator) * sizes[1] ** -0.5 / spread
    zeros = None if code_type is CodeType.FP8 else random(size=(sizes[0], num_groups))
    weight.copy_rows(0, codes, scales.to(dtype), zeros)
    x = _random(_MANY_ROWS, sizes[1], device=device, generator=generator, dtype=shapes.dtype)
    expected = x.double() @ weight.rows(0, sizes[0]).double().T
    actual = torch.cat((quantized_linear(x[: shapes.num_rows], weight), quantized_linear(x, weight)))
    return actual, torch.cat((expected[: shapes.num_rows], expected)), TOLERANCES[shapes.dtype]


def _compare_segments(shapes: OperatorShapes, device: torch.device, generator: torch.Generator) -> Results:
    num_loras = max(1, shapes.num_rows // 3)
    mapping = torch.randint(-1, num_loras, (shapes.num_rows,), device=device, generator=generator)
    capacity = min(shapes.num_rows, num_loras + shapes.num_rows // CHUNK_SIZE)
    expected = reference_segments(mapping, num_loras, CHUNK_SIZE, capacity)
    actual = lora_segments(mapping, num_loras, CHUNK_SIZE)
    num_used = int((mapping >= 0).sum())
    found, wanted = (
        torch.cat((of.permutation[:num_used], of.chunk_start, of.chunk_length, of.chunk_lora_index))
        for of in (actual, expected)
    )
    return found, wanted, 1e-9


def _compare_attention(
    shapes: OperatorShapes,
    options: AttentionOptions,
    window: int | None,
    longest: int,
    device: torch.device,
    generator: torch.Generator,
) -> Results:
    """Sequences whose blocks lie in any order; slots that none of them has are NaN. longest: most tokens of one."""
    block_size, contexts = shapes.block_size, shapes.contexts
    query_lens = [1 if row == 0 else min(longest, context) for row, context in enumerate(contexts)]
    num_blocks = [-(-context // block_size) for context in contexts]
    places = torch.randperm(sum(num_blocks), device=device, generator=generator)
    tables = torch.zeros(len(contexts), max(num_blocks), dtype=torch.int64, device=device)
    cache = torch.full(
        (2, sum(num_blocks) * block_size, shapes.num_kv_heads, shapes.head_dim), torch.nan, device=device
    )
    first, own_slots = 0, []
    for row, (context, count) in enumerate(zip(contexts, num_blocks, strict=True)):
        tables[row, :count] = places[first : first + count]
        positions = torch.arange(context, device=device)
        slots = tables[row, positions // block_size] * block_size + positions % block_size
        cache[:, slots] = torch.randn(2, context, *cache.shape[2:], device=device, generator=generator)
        own_slots.append(slots[context - query_lens[row] :])
        first += count
    slots = torch.cat(own_slots)
    cache[:, slots] = torch.nan
    kv_dtype = shapes.kv_dtype or shapes.dtype
    keys, values = quantize_rows(cache) if kv_dtype == torch.int8 else cache.to(kv_dtype)
    random = partial(_random, device=device, generator=generator, dtype=shapes.dtype)
    num_tokens, num_heads = len(slots), shapes.num_heads + 2 * shapes.num_kv_heads
    rotary_dim = shapes.head_dim if shapes.rotary_dim is None else shapes.rotary_dim
    qkv = random(num_tokens, num_heads * shapes.head_dim)
    cos, sin = (random(num_tokens, 1, rotary_dim) for _ in range(2))
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], device=device)
    lengths = torch.tensor(contexts, device=device)
    num_decodes = len(contexts) if longest == 1 else 1
    sequences = PagedSequences(tables, starts, lengths, num_decodes, block_size, window)
    exact_keys, exact_values = (x.clone() if kv_dtype == torch.int8 else x.double() for x in (keys, values))
    actual = rotary_attention(qkv, cos, sin, keys, values, slots, sequences, options)
    expected = reference.rotary_attention(
        qkv.double(),
        cos.double(),
        sin.double(),
        exact_keys,
        exact_values,
        slots,
        tables,
        starts,
        lengths,
        num_decodes,
        block_size,
        window or 0,
        float(shapes.head_dim) ** -0.5,
        options.softcap,
        options.sinks,
        False,
    )
    return actual, expected, max(TOLERANCES.get(dtype, 3e-2) for dtype in (shapes.dtype, kv_dtype))


class _LoRABatch:
    """Tokens of adapters of several ranks, some of the base model, and adapters as the engine packs them."""

    def __init__(
        self,
        shapes: OperatorShapes,
        in_features: int,
        slice_sizes: tuple[int, ...],
        chunk_size: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self._slice_sizes = slice_sizes
        self._dtype = shapes.dtype
        self._ranks = sorted({min(rank, shapes.max_rank) for rank in (1, 7, 16, shapes.max_rank)})
        self._tables = _adapters(self._ranks, in_features, slice_sizes, shapes.lora_dtype, device, generator)
        mapping = torch.randint(-1, len(self._ranks), (shapes.num_rows,), device=device, generator=generator)
        self._segments: LoRASegments = lora_segments(mapping, len(self._ranks), chunk_size)
        self._has_adapter = mapping >= 0
        rank_of_token = torch.tensor(self._ranks, device=device)[mapping.clamp(min=0)]
        columns = torch.arange(shapes.max_rank, device=device)
        self._is_defined = (columns < rank_of_token[:, None]) & self._has_adapter[:, None]
        random = partial(_random, device=device, generator=generator)
        self._x = random(shapes.num_rows, in_features, dtype=shapes.dtype)
        self._y = random(shapes.num_rows, sum(slice_sizes), dtype=shapes.dtype)
        self._v = random(1, len(slice_sizes), shapes.num_rows, self._tables.max_rank, dtype=torch.float32)

    def __str__(self) -> str:
        chunks = f"chunks of {self._segments.chunk_size}"
        return f"{len(self._x)} rows in {chunks}, ranks {self._ranks}, {self._dtype}, {self._tables.arena.dtype}"

    def compare_shrink(self) -> Results:
        arguments = (self._tables, 0, len(self._slice_sizes), self._segments)
        actual = lora_shrink(self._x, *arguments).double().sum(0)
        expected = reference.lora_shrink(self._x.double(), *arguments)[0]
        # Products and sums are float32 for inputs of all types.
        return self._defined(actual), self._defined(expected), TOLERANCES[torch.float32]

    def compare_expand(self) -> Results:
        arguments = (self._tables, 0, self._slice_sizes, self._segments)
        actual, expected = self._y.clone(), self._y.double()
        lora_expand(self._v, actual, *arguments)
        reference.lora_expand(self._v.double(), expected, *arguments)
        return actual, expected, TOLERANCES[self._dtype]

    def compare_apply(self) -> Results:
        arguments = (self._tables, 0, self._slice_sizes, self._segments)
        actual, expected = self._y.clone(), self._y.double()
        lora_apply(self._x, actual, *arguments)
        v = reference.lora_shrink(self._x.double(), self._tables, 0, len(self._slice_sizes), self._segments)
        reference.lora_expand(v, expected, *arguments)
        return actual, expected, TOLERANCES[self._dtype]

    def _defined(self, v: torch.Tensor) -> torch.Tensor:
        """v: [num_slices, num_tokens, max_rank]."""
        return v.where(self._is_defined[:, : v.shape[2]], 0.0)


def _adapters(
    ranks: list[int],
    in_features: int,
    slice_sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> LoRATables:
    """One adapter a rank, on all slices; each A and B from a multiple of 64 bytes on, every second with a magnitude."""
    pieces: list[torch.Tensor] = []
    bits, end = CODE_BITS.get(dtype), 0
    offsets = torch.full((3, len(ranks), len(slice_sizes)), -1)

    def add(values: torch.Tensor) -> int:
        nonlocal end
        data, start = values.contiguous().view(torch.uint8).flatten(), end
        padding = data.new_full((-data.numel() % 64,), 255)
        pieces.extend((data, padding))
        end += data.numel() + padding.numel()
        return start // dtype.itemsize

    random = partial(_random, device=device, generator=generator, dtype=torch.float32)
    for row, rank in enumerate(ranks):
        for column, size in enumerate(slice_sizes):
            a, b = random(rank, in_features) * in_features**-0.5, random(size, rank) * rank**-0.5
            offsets[0, row, column] = add(reference_a(a, bits) if bits else a.to(dtype))
            offsets[1, row, column] = add(reference_b(b, bits) if bits else b.to(dtype))
            if row % 2:
                offsets[2, row, column] = add(random(size) if bits else random(size).to(dtype))
    rank_table = torch.tensor(ranks, dtype=torch.int32)[:, None].repeat(1, len(slice_sizes))
    arena = torch.cat(pieces).view(dtype)
    a_offset, b_offset, magnitude_offset = offsets.to(device)
    return LoRATables(arena, rank_table.to(device), a_offset, b_offset, magnitude_offset, max_rank=max(ranks))


def _random(*shape: int, device: torch.device, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device, generator=generator).to(dtype)
