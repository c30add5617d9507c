"""What `self_test` compares: every GPU operator with its plain reference, on random inputs of a model's shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from multilora_kernels import penalties_reference, reference, sampling_reference, step_inputs_reference
from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.adapter_order import has_own_order, order_codes
from multilora_kernels.adapter_quantization import reference_a, reference_b
from multilora_kernels.apply import lora_apply
from multilora_kernels.attention import AttentionOptions, PagedSequences, paged_attention, rotary_attention
from multilora_kernels.elementwise import add_layer_norm, add_rms_norm, gelu, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.expand import lora_expand, lora_expand_activated
from multilora_kernels.experts import expert_mlp, route
from multilora_kernels.huge_pages import HugePages
from multilora_kernels.kv_rows import LARGEST_CODES, KVCodes, KVRows, copy_slots, load_rows, quantize_rows
from multilora_kernels.lora_segments import lora_segments
from multilora_kernels.packed_experts import PackedExperts
from multilora_kernels.penalties import forbid_tokens, penalise_tokens
from multilora_kernels.quantized import CodeType, QuantizedWeight, quantized_linear
from multilora_kernels.sampling import SamplingRule, sample_tokens
from multilora_kernels.segments import (
    CHUNK_SIZE,
    MAX_DECODE_TOKENS,
    PREFILL_CHUNK_SIZE,
    ROWS,
    LoRASegments,
    reference_segments,
    rows_of,
)
from multilora_kernels.shrink import lora_shrink
from multilora_kernels.step_inputs import StepInputs, fill_step_inputs
from multilora_kernels.tables import ExpertLoRA, LoRATables


class ExpertShapes(NamedTuple):
    """A mixture of experts. size: of one expert's activation. clamp_limit: 0 for the plain gate."""

    num_experts: int
    top_k: int
    size: int
    clamp_limit: float = 0.0
    has_biases: bool = False


@dataclass(frozen=True)
class OperatorShapes:
    """The shapes in which a model calls the operators.

    linears: in_features and the widths of the slices of each fused linear. mlp_size: the width of an activation.
    max_rank: the largest rank of an adapter. contexts: the numbers of keys of the sequences. num_rows: the tokens of a
    batch. vocab_size: the width of the logits. dtype: the type of activations. lora_dtype: the type of the arena.
    kv_dtype: the type of keys and values; None means dtype.
    rotations: for each kind of layer, how many elements of a head turn, and whether pairs are interleaved. Empty: all
    elements turn.
    code_types: the codes of quantised linears, with their group sizes.
    more_rows: the tokens of further batches with adapters, for which the tables of tile sizes have plans of their own.
    experts: of the model's mixtures; None for a model without.
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
    rotations: tuple[tuple[int, bool], ...] = ()
    code_types: tuple[tuple[CodeType, int], ...] = ()
    more_rows: tuple[int, ...] = ()
    experts: ExpertShapes | None = None


_CHUNK_SIZES = (CHUNK_SIZE, PREFILL_CHUNK_SIZE, ROWS)
_SEGMENTED_ROWS = (MAX_DECODE_TOKENS + 88, 2100)
"""The tokens of batches with prompts. Their kernels have other tile sizes than the kernels of decodes."""

_PROMPT_ROWS = 448
"""So many that a program expands several blocks of outputs of a linear as wide as the gate and up of half a billion
parameters."""

_CODED_OUTPUTS, _FEW_ROWS, _MANY_ROWS = 1024, 3, 300

_COMPARED_EXPERTS = 6
"""Experts that are compared at most: no kernel depends on their number, and all of a model's would take its memory."""

Results = tuple[torch.Tensor, torch.Tensor, float]
"""The results of an operator and of the reference, and the tolerance, relative to 1 + |the reference|."""

TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Comparison(NamedTuple):
    """An operator, its shapes in words, and the function that compares, on inputs that a generator on the device draws.

    The function makes its inputs itself. So a failure, or a long time, belongs to the operator that is named.
    """

    operator: str
    shapes: str
    compare: Callable[[torch.Generator], Results]


def comparisons(shapes: OperatorShapes) -> list[Comparison]:
    """All comparisons. An operator that is made of others comes after these."""
    return [
        *_of_adapters(shapes),
        *_of_attention(shapes),
        *_of_codes(shapes),
        *_of_experts(shapes),
        *_between_linears(shapes),
        *_of_logits(shapes),
        *_of_step_inputs(shapes),
    ]


def _of_adapters(shapes: OperatorShapes) -> Iterator[Comparison]:
    of_rows = dict.fromkeys((shapes.num_rows, *shapes.more_rows))
    widest = max(shapes.linears, key=lambda linear: sum(linear[1]))
    of_prompts = (widest, _PROMPT_ROWS, PREFILL_CHUNK_SIZE)
    cases = (*itertools.product(shapes.linears, of_rows, _CHUNK_SIZES), of_prompts)
    for (in_features, slice_sizes), rows, chunk_size in cases:
        described = (
            f"{in_features} inputs, outputs {slice_sizes}, {rows} rows {_cut(chunk_size)}, "
            f"ranks {_ranks(shapes)}, {shapes.dtype}, {shapes.lora_dtype}"
        )
        batch = partial(_LoRABatch, shapes, in_features, slice_sizes, rows, chunk_size)
        yield Comparison("lora_shrink", described, partial(_compare_shrink, batch))
        yield Comparison("lora_expand", described, partial(_compare_expand, batch))
        yield Comparison("lora_apply", described, partial(_compare_apply, batch))
    cut = (*itertools.product(of_rows, (CHUNK_SIZE, ROWS)), (_PROMPT_ROWS, PREFILL_CHUNK_SIZE))
    for (rows, chunk_size), activation in itertools.product(cut, ("silu", "gelu_tanh")):
        described = (
            f"{activation}, outputs {shapes.mlp_size}, {rows} rows {_cut(chunk_size)}, "
            f"ranks {_ranks(shapes)}, {shapes.dtype}, {shapes.lora_dtype}"
        )
        batch = partial(_LoRABatch, shapes, shapes.hidden_size, (shapes.mlp_size,) * 2, rows, chunk_size)
        yield Comparison("lora_expand_activated", described, partial(_compare_activated, batch, activation))
    for rows in (shapes.num_rows, *_SEGMENTED_ROWS):
        yield Comparison("lora_segments", f"{rows} rows", partial(_compare_segments, rows))


def _of_attention(shapes: OperatorShapes) -> Iterator[Comparison]:
    turning, *others = shapes.rotations or ((shapes.head_dim, False),)
    options = ("", "soft cap", "sinks", "bias by distance")
    for option, window, longest in itertools.product(options, _windows(shapes), _longest(shapes)):
        case = _AttentionCase(shapes, option, window, longest, *turning)
        yield Comparison("rotary_attention", str(case), case.compare_with_rotation)
    for rotation, longest in itertools.product(others, _longest(shapes)):
        case = _AttentionCase(shapes, "", None, longest, *rotation)
        yield Comparison("rotary_attention", str(case), case.compare_with_rotation)
    for window, longest in itertools.product(_windows(shapes), _longest(shapes)):
        case = _AttentionCase(shapes, "", window, longest)
        yield Comparison("paged_attention", str(case), case.compare_alone)


def _windows(shapes: OperatorShapes) -> tuple[int | None, ...]:
    return None, shapes.block_size + 1


def _longest(shapes: OperatorShapes) -> tuple[int, ...]:
    """Most tokens of a sequence: of a step of decodes, and of one with prompts."""
    return 1, shapes.num_rows


def _of_codes(shapes: OperatorShapes) -> Iterator[Comparison]:
    for (code_type, group_size), (in_features, slice_sizes) in itertools.product(shapes.code_types, shapes.linears):
        described = f"{in_features} inputs, {code_type.value} in groups of {group_size}, {shapes.dtype}"
        sizes = (min(sum(slice_sizes), _CODED_OUTPUTS), in_features)
        compare = partial(_compare_codes, shapes, code_type, group_size, sizes)
        yield Comparison("quantized_linear", described, compare)


def _of_experts(shapes: OperatorShapes) -> Iterator[Comparison]:
    if shapes.experts is None:
        return
    num_experts, top_k, size, *_ = shapes.experts
    for is_normalised in (False, True):
        described = f"{shapes.num_rows} rows, {top_k} of {num_experts}{', normalised' if is_normalised else ''}"
        yield Comparison("route", described, partial(_compare_route, shapes, shapes.experts, is_normalised))
    for codes, rows in itertools.product((None, *shapes.code_types), (shapes.num_rows, _MANY_ROWS)):
        words = "floats" if codes is None else f"{codes[0].value} in groups of {codes[1]}"
        described = (
            f"{rows} rows, {shapes.hidden_size} inputs, size {size}, {words}, {shapes.dtype}, {shapes.lora_dtype}"
        )
        compare = partial(_compare_experts, shapes, shapes.experts, codes, rows)
        yield Comparison("expert_mlp", described, compare)


def _between_linears(shapes: OperatorShapes) -> Iterator[Comparison]:
    rows, hidden, mlp = shapes.num_rows, shapes.hidden_size, shapes.mlp_size
    described = f"[{rows}, {hidden}] {shapes.dtype}"
    yield Comparison(
        "add_rms_norm", described, partial(_compare_norm, shapes, add_rms_norm, reference.add_rms_norm, False)
    )
    yield Comparison(
        "add_layer_norm", described, partial(_compare_norm, shapes, add_layer_norm, reference.add_layer_norm, True)
    )
    described = f"[{rows}, {mlp}] {shapes.dtype}"
    activations = (
        (silu_mul, reference.silu_mul, 2 * mlp),
        (gelu_tanh_mul, reference.gelu_tanh_mul, 2 * mlp),
        (gelu_tanh, reference.gelu_tanh, mlp),
        (gelu, reference.gelu, mlp),
    )
    for operator, expected, width in activations:
        compare = partial(_compare_activation, shapes, operator, expected, width)
        yield Comparison(operator.__name__, described, compare)


def _of_logits(shapes: OperatorShapes) -> Iterator[Comparison]:
    described = f"[{shapes.num_rows}, {shapes.vocab_size}]"
    for operator, compare in (
        ("penalise_tokens", _compare_penalties),
        ("forbid_tokens", _compare_bans),
        ("sample_tokens", _compare_tokens),
    ):
        yield Comparison(operator, described, partial(compare, shapes))


def _of_step_inputs(shapes: OperatorShapes) -> Iterator[Comparison]:
    for name, has_sequences in (("of decodes", True), ("of tokens alone", False)):
        compare = partial(_compare_step_inputs, shapes, has_sequences)
        yield Comparison("fill_step_inputs", f"{shapes.num_rows} rows, {name}", compare)


def _logits(shapes: OperatorShapes, generator: torch.Generator) -> torch.Tensor:
    return _random(shapes.num_rows, shapes.vocab_size, generator=generator, dtype=torch.float32) * 3


def _compare_penalties(shapes: OperatorShapes, generator: torch.Generator) -> Results:
    """Logits and counts after penalties of every kind must be equal. Every second row is penalised."""
    logits = _logits(shapes, generator)
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


def _compare_bans(shapes: OperatorShapes, generator: torch.Generator) -> Results:
    """Bans of some tokens of every row. Two thirds of them ask for a certain last token, which half the rows have."""
    logits = _logits(shapes, generator)
    num_rows, vocab = logits.shape
    rows = torch.arange(num_rows, device=logits.device).repeat(3)
    token_ids = torch.arange(len(rows), device=logits.device) * 7 % vocab
    bans = torch.stack([rows, token_ids, token_ids % 3 - 1])
    results = []
    for forbid in (forbid_tokens, penalties_reference.forbid_tokens):
        x = logits.clone()
        forbid(x, bans, rows[:num_rows] % 2)
        # A number in place of -inf, because -inf less -inf is NaN.
        results.append(torch.where(x == -torch.inf, -1e9, x))
    return results[0], results[1], 1e-9


def _compare_tokens(shapes: OperatorShapes, generator: torch.Generator) -> Results:
    """The tokens by rules of every kind must be equal. Some logits are rounded, so that there are ties."""
    logits = _logits(shapes, generator)
    logits[1::2] = logits[1::2].round()
    kinds = ((0, 1.0, 0.0), (1, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02), (50, 0.7, 0.1))
    rules = [SamplingRule(0.5 + row % 3, *kinds[row % len(kinds)], row / len(logits)) for row in range(len(logits))]
    parameters = torch.tensor(rules, dtype=torch.float64, device=logits.device)
    return sample_tokens(logits, rules), sampling_reference.sample_tokens(logits, parameters), 1e-9


def _compare_step_inputs(shapes: OperatorShapes, has_sequences: bool, generator: torch.Generator) -> Results:
    """All memory of a graph that has some more rows and blocks than the step. has_sequences: False for tokens only."""
    num_rows, num_graph_rows = shapes.num_rows, shapes.num_rows + 5
    num_blocks = -(-max(shapes.contexts) // shapes.block_size)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(1 << 40, shape, device=generator.device, generator=generator)

    def inputs(rows: int, logits_rows: int, blocks: int) -> StepInputs:
        vectors = [drawn(rows) for _ in range(5 if has_sequences else 3)]
        return StepInputs(*vectors, *((drawn(logits_rows), drawn(rows, blocks)) if has_sequences else ()))

    graph = inputs(num_graph_rows, num_graph_rows, num_blocks + 2)
    step = inputs(num_rows, max(1, num_rows - 2), num_blocks)
    results = []
    for fill in (fill_step_inputs, step_inputs_reference.fill_step_inputs):
        filled = StepInputs(*(None if tensor is None else tensor.clone() for tensor in _tensors(graph)))  # type: ignore[arg-type]
        fill(filled, step, num_graph_rows - 1, num_blocks, shapes.block_size)
        results.append(torch.cat([tensor.flatten() for tensor in _tensors(filled) if tensor is not None]))
    return results[0], results[1], 1e-15


def _tensors(inputs: StepInputs) -> list[torch.Tensor | None]:
    return [*inputs.vectors, inputs.block_tables]


def _compare_norm(
    shapes: OperatorShapes,
    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    expected: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    has_bias: bool,
    generator: torch.Generator,
) -> Results:
    random = partial(_random, generator=generator, dtype=shapes.dtype)
    rows, hidden, eps = shapes.num_rows, shapes.hidden_size, 1e-5
    x, update = random(rows, hidden), random(rows, hidden)
    weights = [random(hidden) for _ in range(1 + has_bias)]
    normed, total = operator(x, update, *weights, eps)
    # The norm is taken of the sum as it is stored.
    stored, zero = total.double(), torch.zeros_like(total, dtype=torch.float64)
    expected_normed, _ = expected(stored, zero, *(weight.double() for weight in weights), eps)
    expected_total = x.double() + update.double()
    return torch.cat((normed, total)), torch.cat((expected_normed, expected_total)), TOLERANCES[shapes.dtype]


def _compare_activation(
    shapes: OperatorShapes,
    operator: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    generator: torch.Generator,
) -> Results:
    x = _random(shapes.num_rows, width, generator=generator, dtype=shapes.dtype)
    return operator(x), expected(x.double()), TOLERANCES[shapes.dtype]


def _compare_codes(
    shapes: OperatorShapes,
    code_type: CodeType,
    group_size: int,
    sizes: tuple[int, int],
    generator: torch.Generator,
) -> Results:
    """Few and some rows, which are multiplied with codes, and many rows, for which codes become floats."""
    device = generator.device
    dtype = torch.bfloat16 if shapes.dtype == torch.float32 else shapes.dtype
    group_size = min(group_size, sizes[1])
    weight = QuantizedWeight(*sizes, code_type, group_size, dtype, device, compute_dtype=dtype)
    _fill_with_codes(weight, generator)
    x = _random(_MANY_ROWS, sizes[1], generator=generator, dtype=shapes.dtype)
    expected = x.double() @ weight.rows(0, sizes[0]).double().T
    all_rows = (_FEW_ROWS, shapes.num_rows, _MANY_ROWS)
    actual = torch.cat([quantized_linear(x[:rows], weight) for rows in all_rows])
    return actual, torch.cat([expected[:rows] for rows in all_rows]), TOLERANCES[shapes.dtype]


def _fill_with_codes(weight: QuantizedWeight, generator: torch.Generator) -> None:
    """Codes, scales and zeros of all outputs. Products with numbers of about 1 are about 1, too."""
    (num_outputs, num_inputs), code_type, device = weight.shape, weight.code_type, generator.device
    random = partial(torch.randint, 1 << code_type.bits, device=device, generator=generator, dtype=torch.uint8)
    # Without the two codes of FP8 that are NaN.
    codes = random(size=(num_outputs, num_inputs)) & (0xBF if code_type is CodeType.FP8 else 0xFF)
    spread = 1 if code_type is CodeType.FP8 else 1 << (code_type.bits - 1)
    scales = torch.rand(num_outputs, weight.num_groups, device=device, generator=generator)
    zeros = None if code_type is CodeType.FP8 else random(size=(num_outputs, weight.num_groups))
    weight.copy_rows(0, codes, scales * num_inputs**-0.5 / spread, zeros)


def _compare_route(
    shapes: OperatorShapes, experts: ExpertShapes, is_normalised: bool, generator: torch.Generator
) -> Results:
    """Choices must be equal. Some logits are rounded, so that there are ties."""
    logits = _random(shapes.num_rows, experts.num_experts, generator=generator, dtype=torch.float32) * 3
    logits[1::2] = logits[1::2].round()
    found, wanted = (
        torch.cat([part.double() for part in choose(of, experts.top_k, is_normalised)])
        for choose, of in ((route, logits), (reference.route, logits.double()))
    )
    return found, wanted, 1e-5


def _compare_experts(
    shapes: OperatorShapes,
    experts: ExpertShapes,
    codes: tuple[CodeType, int] | None,
    num_rows: int,
    generator: torch.Generator,
) -> Results:
    """Experts with adapters on some of them, and the weights as the device has them."""
    device, hidden, size = generator.device, shapes.hidden_size, experts.size
    dtype = torch.bfloat16 if shapes.dtype == torch.float32 and codes is not None else shapes.dtype
    num_experts = min(experts.num_experts, _COMPARED_EXPERTS)
    random = partial(_random, generator=generator)

    def packed(num_outputs: int, num_inputs: int) -> PackedExperts:
        sizes = (num_experts, num_outputs, num_inputs)
        if codes is None:
            filled = PackedExperts.empty(*sizes, dtype, device, dtype, HugePages())
        else:
            group_size = min(codes[1], num_inputs)
            filled = PackedExperts.of_codes(*sizes, codes[0], group_size, dtype, device, compute_dtype=dtype)
        for index in range(num_experts):
            expert = filled.expert(index)
            if isinstance(expert, QuantizedWeight):
                _fill_with_codes(expert, generator)
            else:
                expert.copy_rows(0, random(num_outputs, num_inputs, dtype=dtype) * num_inputs**-0.5)
        return filled

    gate_up, down = packed(2 * size, hidden), packed(hidden, size)
    gate_up_bias, down_bias = (
        random(num_experts, width, dtype=shapes.dtype) if experts.has_biases else None for width in (2 * size, hidden)
    )
    columns = [(hidden, size)] * 2 * num_experts + [(size, hidden)] * num_experts
    tables = _adapters(_ranks(shapes), columns, shapes.lora_dtype, generator, has_magnitudes=False)
    tables.rank[:, ::3] = 0
    mapping = torch.randint(-1, len(tables.rank), (num_rows,), device=device, generator=generator)
    of_columns = (mapping, 0, num_experts, 2 * num_experts)
    logits = random(num_rows, num_experts, dtype=torch.float32)
    expert_ids, weights = reference.route(logits, min(experts.top_k, num_experts), True)
    x = random(num_rows, hidden, dtype=shapes.dtype)
    actual, expected = (
        compute(
            *(rows, expert_ids, weights, gate_up, down, gate_up_bias, down_bias, experts.clamp_limit),
            ExpertLoRA(adapters, *of_columns),
        )
        for compute, rows, adapters in (
            (expert_mlp, x, _placed(tables, columns)),
            (reference.expert_mlp, x.double(), tables),
        )
    )
    # Gates, ups and activations have the type of x between two products.
    return actual, expected, 2 * TOLERANCES[shapes.dtype]


def _compare_segments(num_rows: int, generator: torch.Generator) -> Results:
    num_loras = max(1, num_rows // 3)
    mapping = torch.randint(-1, num_loras, (num_rows,), device=generator.device, generator=generator)
    actual = lora_segments(mapping, num_loras)
    expected = _segments(mapping, num_loras, actual.chunk_size)
    num_used = int((mapping >= 0).sum())
    found, wanted = (
        torch.cat((of.permutation[:num_used], of.chunk_start, of.chunk_length, of.chunk_lora_index))
        for of in (actual, expected)
    )
    return found, wanted, 1e-9


def _cut(chunk_size: int) -> str:
    return "by themselves" if chunk_size == ROWS else f"in chunks of {chunk_size}"


def _segments(mapping: torch.Tensor, num_loras: int, chunk_size: int) -> LoRASegments:
    """By the reference: an operator that takes them is not to fail for theirs."""
    if chunk_size == ROWS:
        return rows_of(mapping)
    capacity = min(len(mapping), num_loras + len(mapping) // chunk_size)
    return reference_segments(mapping, num_loras, chunk_size, capacity)


class _Paged(NamedTuple):
    """Sequences, their cache, and the slots of their own tokens."""

    sequences: PagedSequences
    keys: KVRows
    values: KVRows
    slots: torch.Tensor


@dataclass(frozen=True)
class _AttentionCase:
    """Sequences whose blocks lie in any order; slots that none of them has are NaN.

    option: of the scores. longest: most tokens of a sequence; 1 of a step of decodes. rotary_dim: None for attention
    alone.
    """

    shapes: OperatorShapes
    option: str
    window: int | None
    longest: int
    rotary_dim: int | None = None
    is_interleaved: bool = False

    def __str__(self) -> str:
        shapes = self.shapes
        tokens = "one token each" if self.longest == 1 else f"up to {self.longest} tokens"
        rotation = ""
        if self.rotary_dim is not None:
            rotation = f", {self.rotary_dim} turned{' in pairs' if self.is_interleaved else ''}"
        return (
            f"{shapes.num_heads} heads on {shapes.num_kv_heads} of {shapes.head_dim}{rotation}, contexts "
            f"{shapes.contexts}, {tokens}, window {self.window}{self.option and ' '}{self.option}, {shapes.dtype}, "
            f"cache {self._kv_dtype}"
        )

    @property
    def _kv_dtype(self) -> torch.dtype:
        return self.shapes.kv_dtype or self.shapes.dtype

    @property
    def _tolerance(self) -> float:
        """Codes are exact in floats: over the same ones, both attend with the precision of activations."""
        return max(TOLERANCES[dtype] for dtype in (self.shapes.dtype, self._kv_dtype) if dtype not in LARGEST_CODES)

    def compare_alone(self, generator: torch.Generator) -> Results:
        paged, shapes = self._paged(generator, has_own=True), self.shapes
        q = _random(len(paged.slots), shapes.num_heads, shapes.head_dim, generator=generator, dtype=shapes.dtype)
        options = self._options(generator)
        actual = paged_attention(q, paged.keys, paged.values, paged.sequences, options)
        keys, values = self._exact(paged)
        expected = reference.paged_attention(q.double(), keys, values, *self._fields(paged.sequences, options))
        return actual, expected, self._tolerance

    def compare_with_rotation(self, generator: torch.Generator) -> Results:
        """The rows that the operator stored, with the exact ones; and its result, with attention over what it stored.

        A rotated value has the type of activations before it becomes a code. Where the exact value is near the middle
        of two codes, either is right, and the scores of a few keys differ by more for that than for the rounding of
        attention itself.
        """
        paged, shapes = self._paged(generator, has_own=False), self.shapes
        random = partial(_random, generator=generator, dtype=shapes.dtype)
        num_tokens, num_heads = len(paged.slots), shapes.num_heads + 2 * shapes.num_kv_heads
        qkv = random(num_tokens, num_heads * shapes.head_dim)
        cos, sin = (random(num_tokens, 1, self.rotary_dim or 0) for _ in range(2))
        options = self._options(generator)
        own = paged._replace(keys=paged.keys.clone(), values=paged.values.clone())
        actual = rotary_attention(
            qkv, cos, sin, own.keys, own.values, own.slots, own.sequences, options, self.is_interleaved
        )
        q, *exact_rows = self._turned(qkv.double(), cos.double(), sin.double())
        _, *sizes = self._turned(*(x.double().abs() for x in (qkv, cos, sin)))
        errors, caches = [], ((paged.keys, own.keys), (paged.values, own.values))
        for (cache, stored), exact, size in zip(caches, exact_rows, sizes, strict=True):
            errors.append(self._errors_of_rows(load_rows(stored, own.slots, torch.float64), exact, size).flatten())
            copy_slots(stored, cache, own.slots)
        keys, values = self._exact(paged)
        fields = self._fields(paged.sequences, options)
        # Queries have the type of activations after the rotation, too.
        expected = reference.paged_attention(q.to(shapes.dtype).double(), keys, values, *fields)
        none = torch.zeros_like(torch.cat(errors))
        return torch.cat((actual.flatten(), *errors)), torch.cat((expected.flatten(), none)), self._tolerance

    def _turned(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values as the rotation leaves them, each [num_tokens, heads, head_dim]."""
        keys, values = qkv.new_empty(2, len(qkv), self.shapes.num_kv_heads, self.shapes.head_dim)
        slots = torch.arange(len(qkv), device=qkv.device)
        q = reference.rotate_and_store(qkv, cos, sin, keys, values, slots, self.is_interleaved)
        return q, keys, values

    def _errors_of_rows(self, stored: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Errors beyond half a code, in units of what floats round: `size` is the sum of the amounts of the addends."""
        errors = (stored - exact).abs()
        if self._kv_dtype in LARGEST_CODES:
            scales = exact.abs().amax(-1, keepdim=True) / LARGEST_CODES[self._kv_dtype]
            is_int8 = self._kv_dtype == torch.int8
            half = scales / 2 if is_int8 else torch.maximum(exact.abs() / 16, scales * 2.0**-10)
            errors = (errors - half).clamp(min=0)
        return errors / size.clamp(min=torch.finfo(size.dtype).tiny)

    def _stored(self, x: torch.Tensor) -> KVRows:
        is_coded = self._kv_dtype in LARGEST_CODES
        return KVCodes.of_rows(quantize_rows(x, self._kv_dtype)) if is_coded else x.to(self._kv_dtype)

    def _options(self, generator: torch.Generator) -> AttentionOptions:
        if self.option == "sinks":
            sinks = torch.randn(self.shapes.num_heads, device=generator.device, generator=generator)
            return AttentionOptions(sinks=sinks)
        if self.option == "bias by distance":
            # Some keys are farther away than the last distance.
            size = (self.shapes.num_heads, max(self.shapes.contexts) // 2 + 1)
            bias = torch.randn(size, device=generator.device, generator=generator)
            return AttentionOptions(distance_bias=bias)
        return AttentionOptions(softcap=3.0) if self.option == "soft cap" else AttentionOptions()

    def _fields(self, sequences: PagedSequences, options: AttentionOptions) -> tuple[Any, ...]:
        *fields, window = sequences
        scale = float(self.shapes.head_dim) ** -0.5
        return *fields, window or 0, scale, options.softcap, options.sinks, options.distance_bias

    def _exact(self, paged: _Paged) -> list[KVRows]:
        """Copies of keys and values as the reference takes them."""
        return [x.clone() if isinstance(x, KVCodes) else x.double() for x in (paged.keys, paged.values)]

    def _paged(self, generator: torch.Generator, has_own: bool) -> _Paged:
        """has_own: whether the cache has the tokens of the step itself."""
        block_size, contexts, device = self.shapes.block_size, self.shapes.contexts, generator.device
        query_lens = [1 if row == 0 else min(self.longest, context) for row, context in enumerate(contexts)]
        num_blocks = [-(-context // block_size) for context in contexts]
        places = torch.randperm(sum(num_blocks), device=device, generator=generator)
        tables = torch.zeros(len(contexts), max(num_blocks), dtype=torch.int64, device=device)
        shape = (2, sum(num_blocks) * block_size, self.shapes.num_kv_heads, self.shapes.head_dim)
        cache = torch.full(shape, torch.nan, device=device)
        first, own_slots = 0, []
        for row, (context, count) in enumerate(zip(contexts, num_blocks, strict=True)):
            tables[row, :count] = places[first : first + count]
            positions = torch.arange(context, device=device)
            slots = tables[row, positions // block_size] * block_size + positions % block_size
            cache[:, slots] = torch.randn(2, context, *shape[2:], device=device, generator=generator)
            own_slots.append(slots[context - query_lens[row] :])
            first += count
        slots = torch.cat(own_slots)
        if not has_own:
            cache[:, slots] = torch.nan
        keys, values = self._stored(cache[0]), self._stored(cache[1])
        starts = torch.tensor([0, *itertools.accumulate(query_lens)], device=device)
        lengths = torch.tensor(contexts, device=device)
        num_decodes = len(contexts) if self.longest == 1 else 1
        sequences = PagedSequences(tables, starts, lengths, num_decodes, block_size, self.window)
        return _Paged(sequences, keys, values, slots)


def _ranks(shapes: OperatorShapes) -> list[int]:
    return sorted({min(rank, shapes.max_rank) for rank in (1, 7, 16, shapes.max_rank)})


class _LoRABatch:
    """Tokens of adapters of several ranks, some of the base model, and adapters as the engine packs them."""

    def __init__(
        self,
        shapes: OperatorShapes,
        in_features: int,
        slice_sizes: tuple[int, ...],
        num_rows: int,
        chunk_size: int,
        generator: torch.Generator,
    ) -> None:
        device, ranks = generator.device, _ranks(shapes)
        self.slice_sizes, self.dtype = slice_sizes, shapes.dtype
        linears = [(in_features, size) for size in slice_sizes]
        self.tables = _adapters(ranks, linears, shapes.lora_dtype, generator)
        self.placed = _placed(self.tables, linears)
        mapping = torch.randint(-1, len(ranks), (num_rows,), device=device, generator=generator)
        self.segments = _segments(mapping, len(ranks), chunk_size)
        rank_of_token = torch.tensor(ranks, device=device)[mapping.clamp(min=0)]
        columns = torch.arange(shapes.max_rank, device=device)
        self._is_defined = (columns < rank_of_token[:, None]) & (mapping >= 0)[:, None]
        random = partial(_random, generator=generator)
        self.x = random(num_rows, in_features, dtype=shapes.dtype)
        self.y = random(num_rows, sum(slice_sizes), dtype=shapes.dtype)
        self.v = random(1, len(slice_sizes), num_rows, self.tables.max_rank, dtype=torch.float32)

    def defined(self, v: torch.Tensor) -> torch.Tensor:
        """v: [num_slices, num_tokens, max_rank]."""
        return v.where(self._is_defined[:, : v.shape[2]], 0.0)


def _compare_shrink(make: Callable[[torch.Generator], _LoRABatch], generator: torch.Generator) -> Results:
    batch = make(generator)
    arguments = (0, len(batch.slice_sizes), batch.segments)
    actual = lora_shrink(batch.x, batch.placed, *arguments).double().sum(0)
    expected = reference.lora_shrink(batch.x.double(), batch.tables, *arguments)[0]
    # Products and sums are float32 for inputs of all types.
    return batch.defined(actual), batch.defined(expected), TOLERANCES[torch.float32]


def _compare_expand(make: Callable[[torch.Generator], _LoRABatch], generator: torch.Generator) -> Results:
    batch = make(generator)
    arguments = (0, batch.slice_sizes, batch.segments)
    actual, expected = batch.y.clone(), batch.y.double()
    lora_expand(batch.v, actual, batch.placed, *arguments)
    reference.lora_expand(batch.v.double(), expected, batch.tables, *arguments)
    return actual, expected, TOLERANCES[batch.dtype]


def _compare_activated(
    make: Callable[[torch.Generator], _LoRABatch], activation: str, generator: torch.Generator
) -> Results:
    batch = make(generator)
    arguments = (0, batch.slice_sizes[0], batch.segments, activation)
    actual = lora_expand_activated(batch.v, batch.y.clone(), batch.placed, *arguments)
    expected = reference.lora_expand_activated(batch.v.double(), batch.y.double(), batch.tables, *arguments)
    # Gates and ups have the type of y before their product.
    return actual, expected, 2 * TOLERANCES[batch.dtype]


def _compare_apply(make: Callable[[torch.Generator], _LoRABatch], generator: torch.Generator) -> Results:
    batch = make(generator)
    arguments = (0, batch.slice_sizes, batch.segments)
    actual, expected = batch.y.clone(), batch.y.double()
    lora_apply(batch.x, actual, batch.placed, *arguments)
    v = reference.lora_shrink(batch.x.double(), batch.tables, 0, len(batch.slice_sizes), batch.segments)
    reference.lora_expand(v, expected, batch.tables, *arguments)
    return actual, expected, TOLERANCES[batch.dtype]


def _adapters(
    ranks: list[int],
    columns: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    generator: torch.Generator,
    has_magnitudes: bool = True,
) -> LoRATables:
    """One adapter a rank, on all columns; each A and B from a multiple of 64 bytes on.

    columns: inputs and outputs of each. has_magnitudes: every second adapter has one.
    """
    pieces: list[torch.Tensor] = []
    has_codes, end = dtype in CODE_BITS, 0
    offsets = torch.full((3, len(ranks), len(columns)), -1)

    def add(values: torch.Tensor) -> int:
        nonlocal end
        data, start = values.contiguous().view(torch.uint8).flatten(), end
        padding = data.new_full((-data.numel() % 64,), 255)
        pieces.extend((data, padding))
        end += data.numel() + padding.numel()
        return start // dtype.itemsize

    random = partial(_random, generator=generator, dtype=torch.float32)
    for row, rank in enumerate(ranks):
        for column, (in_features, size) in enumerate(columns):
            a, b = random(rank, in_features) * in_features**-0.5, random(size, rank) * rank**-0.5
            offsets[0, row, column] = add(reference_a(a, dtype) if has_codes else a.to(dtype))
            offsets[1, row, column] = add(reference_b(b, dtype) if has_codes else b.to(dtype))
            if has_magnitudes and row % 2:
                offsets[2, row, column] = add(random(size) if has_codes else random(size).to(dtype))
    rank_table = torch.tensor(ranks, dtype=torch.int32)[:, None].repeat(1, len(columns))
    arena = torch.cat(pieces).view(dtype)
    a_offset, b_offset, magnitude_offset = offsets.to(arena.device)
    return LoRATables(arena, rank_table.to(arena.device), a_offset, b_offset, magnitude_offset, max_rank=max(ranks))


def _placed(tables: LoRATables, columns: Sequence[tuple[int, int]]) -> LoRATables:
    """The adapters as they lie on the device that computes. columns: inputs and outputs of each."""
    if not has_own_order(tables.arena):
        return tables
    placed, has_matrices = tables._replace(arena=tables.arena.clone()), tables.rank > 0
    sizes = torch.tensor([size for _, size in columns], device=tables.arena.device).expand(tables.rank.shape)
    ranks, offsets, sizes = (each[has_matrices].long() for each in (tables.rank, tables.b_offset, sizes))
    order_codes(placed.arena, ranks, offsets, sizes, tables.max_rank)
    return placed


def _random(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=generator.device, generator=generator).to(dtype)
