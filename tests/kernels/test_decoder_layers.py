"""decoder_layers and decoder_logits, bit for bit against their operators one after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from support.attention_cases import make_case, make_rotary_step
from support.synthetic_batches import LinearShape, random_tables

from multilora_kernels import (
    AttentionOptions,
    CodeType,
    HugePages,
    LayerStep,
    LoRASegments,
    LoRATables,
    PackedDecoder,
    PackedHead,
    PackedLayer,
    PackedLayerLinear,
    PackedWeight,
    QuantizedWeight,
    add_rms_norm,
    decoder_layers,
    decoder_logits,
    lora_linear,
    lora_segments,
    packed_linear,
    quantized_linear,
    quantized_lora_linear,
    rotary_attention,
    silu_mul,
)
from multilora_kernels.kv_rows import quantize_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5
NUM_ADAPTERS = 5
FIRST_SLICE = 7
"""The layer is the second of the adapters'."""


@dataclass(frozen=True)
class Linear:
    """One linear of a layer."""

    weight: PackedWeight | QuantizedWeight
    bias: torch.Tensor | None
    first_slice: int
    slice_sizes: tuple[int, ...]

    def multiply(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        is_quantized = isinstance(self.weight, QuantizedWeight)
        if step.tables is None or step.segments is None:
            return (quantized_linear if is_quantized else packed_linear)(x, self.weight, self.bias)
        multiply = quantized_lora_linear if is_quantized else lora_linear
        return multiply(x, self.weight, step.tables, self.first_slice, self.slice_sizes, step.segments, self.bias)

    def packed(self) -> PackedLayerLinear:
        return PackedLayerLinear.of(self.weight, self.bias, self.first_slice, self.slice_sizes)


class Layer:
    """A layer as wide as its queries, and a step of it. x, keys and values are the caller's to change."""

    def __init__(
        self,
        shape,
        sequences,
        *,
        has_bias=False,
        has_adapters=False,
        weight_dtype=torch.float32,
        compute_dtype=torch.float32,
        has_codes=False,
        window=None,
    ):
        case = make_case(shape, sequences, window=window)
        self.compute_dtype = compute_dtype
        rotary = make_rotary_step(case)
        num_tokens, num_heads, head_dim = case.q.shape
        size, kv_size = num_heads * head_dim, case.keys.shape[1] * head_dim
        self.generator, self.pages = torch.Generator().manual_seed(2), HugePages()
        self.norms = [self.random(size) for _ in range(2)]
        sizes = ((size, kv_size, kv_size), (size,), (size, size), (size,))
        self.linears, first_slice = [], FIRST_SLICE
        for slice_sizes in sizes:
            bias = self.random(sum(slice_sizes)) if has_bias else None
            self.linears.append(Linear(self.weight(slice_sizes, size, weight_dtype), bias, first_slice, slice_sizes))
            first_slice += len(slice_sizes)
        self.x, self.update = self.random(num_tokens, size), self.random(num_tokens, size)
        caches = (rotary.keys, rotary.values)
        self.keys, self.values = (quantize_rows(x) if has_codes else x.to(compute_dtype) for x in caches)
        columns = tuple(output for _ in range(2) for slice_sizes in sizes for output in slice_sizes)
        tables, segments = self.adapters(LinearShape(size, columns), num_tokens) if has_adapters else (None, None)
        scale = head_dim**-0.5
        may_round = compute_dtype == torch.bfloat16
        turns = (rotary.cos, rotary.sin, rotary.slots)
        self.step = LayerStep(*turns, case.sequences, scale, may_round, tables, segments)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def weight(
        self, slice_sizes: tuple[int, ...], in_features: int, dtype: torch.dtype | CodeType
    ) -> PackedWeight | QuantizedWeight:
        device = torch.device("cpu")
        if isinstance(dtype, CodeType):
            return self.quantized_weight(sum(slice_sizes), in_features, dtype, device)
        weight = PackedWeight.empty(sum(slice_sizes), in_features, dtype, device, self.compute_dtype, self.pages)
        weight.copy_rows(0, self.random(sum(slice_sizes), in_features) * in_features**-0.5)
        return weight

    def quantized_weight(
        self, out_features: int, in_features: int, code_type: CodeType, device: torch.device
    ) -> QuantizedWeight:
        weight = QuantizedWeight(out_features, in_features, code_type, 32, torch.bfloat16, device, pages=self.pages)
        codes = torch.randint(0, 1 << (code_type.bits - 1), (out_features, in_features), generator=self.generator)
        scales = self.random(out_features, weight.num_groups) * in_features**-0.5 / (1 << code_type.bits)
        zeros = None if code_type is CodeType.FP8 else torch.full(scales.shape, 3, dtype=torch.uint8)
        weight.copy_rows(0, codes.clamp(max=100).to(torch.uint8), scales, zeros)
        return weight

    def adapters(self, shape: LinearShape, num_tokens: int) -> tuple[LoRATables, LoRASegments]:
        """Of several ranks, some without some slices, and tokens without any."""
        choice = torch.randint(0, 5, (NUM_ADAPTERS, shape.num_slices), generator=self.generator)
        rank = torch.tensor([16, 0, 3, 8, 1])[choice]
        tables = random_tables(shape, rank, torch.bfloat16, self.generator)
        mapping = torch.randint(-1, NUM_ADAPTERS, (num_tokens,), generator=self.generator)
        return tables, lora_segments(mapping, NUM_ADAPTERS)

    def decoder(self, num_layers: int = 1, head: PackedHead | None = None) -> PackedDecoder:
        """So many layers, all like this one, in turn with the two steps of `steps`."""
        qkv, o, gate_up, down = (linear.packed() for linear in self.linears)
        packed = PackedLayer(self.norms[0], qkv, o, self.norms[1], gate_up, down, EPS)
        return PackedDecoder([(packed, i % 2) for i in range(num_layers)], head)

    def steps(self) -> tuple[LayerStep, LayerStep]:
        """The step, and an equal one of other objects."""
        return self.step, self.step._replace(cos=self.step.cos.clone())

    def cache(self, num_layers: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of so many layers."""
        return torch.stack([self.keys] * num_layers), torch.stack([self.values] * num_layers)

    def in_one_call(self, steps=None, num_layers=1, on_layer=lambda: None) -> tuple[torch.Tensor, ...] | None:
        """x, update, and the keys and values of each layer."""
        cache = self.cache(num_layers)
        steps = self.steps() if steps is None else steps
        results = decoder_layers(self.decoder(num_layers), steps, cache, self.x, self.update, on_layer)
        return None if results is None else (*results, *chain.from_iterable(zip(*cache, strict=True)))

    def one_by_one(self, num_layers: int = 1) -> tuple[torch.Tensor, ...]:
        qkv, o, gate_up, down = self.linears
        x, update, step, caches = self.x, self.update, self.step, []
        options = AttentionOptions(step.scale, may_round=step.may_round)
        for _ in range(num_layers):
            keys, values = self.keys.clone(), self.values.clone()
            normed, x = add_rms_norm(x, update, self.norms[0], EPS)
            heads = qkv.multiply(normed, step)
            heads = rotary_attention(heads, step.cos, step.sin, keys, values, step.slots, step.sequences, options)
            normed, x = add_rms_norm(x, o.multiply(heads, step), self.norms[1], EPS)
            update = down.multiply(silu_mul(gate_up.multiply(normed, step)), step)
            caches += [keys, values]
        return x, update, *caches


def assert_same_bits(layer: Layer, num_layers: int = 1) -> None:
    done = layer.in_one_call(num_layers=num_layers)
    assert done is not None
    for ours, expected in zip(done, layer.one_by_one(num_layers), strict=True):
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())
        assert ours.isnan().equal(expected.isnan())
    assert not done[0].isnan().any()
    assert not done[1].isnan().any()


@pytest.fixture
def num_threads(request) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sequences", ["decode", "prefill", "chunks behind a prefix"])
@pytest.mark.parametrize("shape", ["default model", "odd head_dim"])
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_step_has_the_bits_of_the_operators_one_by_one(shape, sequences, has_bias, has_adapters):
    assert_same_bits(Layer(shape, sequences, has_bias=has_bias, has_adapters=has_adapters))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_and_windows(weight_dtype):
    assert_same_bits(Layer("llama", "decode", has_adapters=True, weight_dtype=weight_dtype, window=33))


@pytest.mark.parametrize("sequences", ["decode", "prefill"])
@pytest.mark.parametrize("shape", ["llama", "odd head_dim"])
def test_weights_keys_and_values_in_bfloat16_for_products_in_bfloat16(shape, sequences):
    types = {"weight_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
    assert_same_bits(Layer(shape, sequences, has_bias=True, has_adapters=True, **types))


@pytest.mark.parametrize("sequences", ["decode", "chunks behind a prefix"])
@pytest.mark.parametrize("shape", ["llama", "odd head_dim"])
def test_keys_and_values_in_codes(shape, sequences):
    assert_same_bits(Layer(shape, sequences, has_adapters=True, has_codes=True))


@pytest.mark.parametrize("code_type", CodeType)
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("sequences", ["decode", "prefill"])
def test_quantised_weights(sequences, has_adapters, code_type):
    assert_same_bits(Layer("llama", sequences, has_bias=True, has_adapters=has_adapters, weight_dtype=code_type))


@pytest.mark.parametrize("rows", [None, [2, 0], []])
@pytest.mark.parametrize("weight_dtype", [torch.float32, CodeType.INT8])
def test_logits_of_some_rows_or_of_all(rows, weight_dtype):
    layer = Layer("odd head_dim", "chunks behind a prefix", has_adapters=True, weight_dtype=weight_dtype)
    layer.update = torch.zeros_like(layer.x)
    norm = layer.random(layer.x.shape[1])
    weight = layer.weight((77,), layer.x.shape[1], weight_dtype)
    x, update, keys, _ = layer.one_by_one()
    if rows is not None:
        x, update = x[rows], update[rows]
    normed, _ = add_rms_norm(x, update, norm, EPS)
    expected = (quantized_linear if isinstance(weight, QuantizedWeight) else packed_linear)(normed, weight)
    cache = layer.cache()
    decoder = layer.decoder(head=PackedHead.of(norm, EPS, weight))
    index = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    logits = decoder_logits(decoder, layer.steps(), cache, layer.x, index)
    assert logits is not None
    assert torch.equal(logits, expected)
    assert torch.equal(cache[0][0].nan_to_num(), keys.nan_to_num())
    with pytest.raises(IndexError, match=f"row {len(layer.x)} is none of {len(layer.x)}"):
        decoder_logits(decoder, layer.steps(), cache, layer.x, torch.tensor([len(layer.x)]))


def test_a_decoder_keeps_its_tensors():
    layer = Layer("odd head_dim", "decode")
    expected = layer.one_by_one()[0]
    decoder, layer.linears, layer.norms = layer.decoder(), [], []
    gc.collect()
    done = decoder_layers(decoder, layer.steps(), layer.cache(), layer.x, layer.update)
    assert done is not None
    assert torch.equal(done[0], expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7], indirect=True)
@pytest.mark.parametrize("sequences", ["decode", "prefill"])
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.usefixtures("num_threads")
def test_layers_that_threads_compute_together_have_the_same_bits(sequences, has_adapters):
    assert_same_bits(Layer("default model", sequences, has_adapters=has_adapters), num_layers=9)


def test_on_layer_is_called_before_layers_that_begin_far_apart_and_may_stop_them():
    layer, heard = Layer("odd head_dim", "decode"), []

    def hear() -> None:
        heard.append(len(heard))
        begin = time.perf_counter()
        while time.perf_counter() < begin + 0.011:
            pass
        if len(heard) == 3:
            raise KeyError("heard enough")

    assert layer.in_one_call(num_layers=2, on_layer=hear) is not None
    assert heard == [0, 1]
    with pytest.raises(KeyError, match="heard enough"):
        layer.in_one_call(num_layers=2, on_layer=hear)
    assert_same_bits(layer)


def test_what_an_operator_refuses_is_refused():
    layer = Layer("odd head_dim", "decode")
    layer.step.slots[1] = len(layer.keys)
    with pytest.raises(RuntimeError, match=f"slot {len(layer.keys)} is none of {len(layer.keys)}"):
        layer.in_one_call()
    with pytest.raises(TypeError, match="expected PagedSequences, not"):
        layer.in_one_call((layer.step._replace(sequences=None),))
    with pytest.raises(TypeError, match="expected a tuple of steps, not list"):
        layer.in_one_call([layer.step])
    layer.step.slots[1] = 0
    with pytest.raises(IndexError, match="step 1 is none of 1"):
        layer.in_one_call((layer.step,), num_layers=2)
    with pytest.raises(RuntimeError, match=r"keys and values are \[2, slots, heads, head_dim\], not \[1, "):
        decoder_layers(layer.decoder(2), layer.steps(), layer.cache(1), layer.x, layer.update)
