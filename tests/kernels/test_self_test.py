"""The self-test finds operators that compute wrongly; collected on a GPU and in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from support.plain_operators import PLAIN_OPERATORS

from multilora_kernels import CodeType, cuda, reference, self_test
from multilora_kernels.kv_rows import KVCodes, load_rows, quantize_rows
from multilora_kernels.self_test import ExpertShapes, OperatorFault, OperatorShapes, checked_operators

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = OperatorShapes(
    hidden_size=48,
    mlp_size=72,
    linears=((72, (40, 16)),),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=4,
    max_rank=20,
    dtype=torch.bfloat16,
    lora_dtype=torch.bfloat16,
    contexts=(1, 9),
    num_rows=9,
    vocab_size=300,
    rotations=((16, False), (6, True), (0, False)),
    code_types=((CodeType.INT4, 24), (CodeType.INT8, 72), (CodeType.FP8, 72)),
    experts=ExpertShapes(7, 3, 24, 0.9, has_biases=True),
)
STORED = [
    {},
    {"kv_dtype": torch.int8, "lora_dtype": torch.float8_e4m3fn},
    {"kv_dtype": torch.float8_e4m3fn, "block_size": 64, "contexts": (1, 70)},
]
"""Changes to SHAPES: the KV cache and adapters as floats, or in codes."""
ROOM = 0.3
"""A right operator's errors in attention, at most: on a device that we have not seen, other ones round differently."""


@pytest.mark.parametrize("stored", STORED)
def test_right_operators_pass(stored):
    checked = list(checked_operators(dataclasses.replace(SHAPES, **stored), DEVICE))
    # Those that multiply by codes are compared on codes that `order_codes` has placed.
    assert {one.operator for one in checked} == set(cuda.__all__) - {"order_codes"}
    assert [str(one) for one in checked if not one.is_right] == []
    # The interpreter rounds to bfloat16 towards zero, where a GPU rounds to the nearest.
    most = ROOM if DEVICE.type == "cuda" else 2 * ROOM
    assert [str(one) for one in checked if "attention" in one.operator and one.error > most] == []


def test_a_load_stops_at_a_sum_that_lacks_one_element_and_names_it(monkeypatch):
    right = cuda.lora_shrink

    def lora_shrink(x, *arguments):
        without_last = x.clone()
        without_last[:, -1] = 0
        return right(without_last, *arguments)

    monkeypatch.setattr(cuda, "lora_shrink", lora_shrink)
    shapes = r"72 inputs, outputs \(40, 16\), 9 rows in chunks of 16, ranks \[1, 7, 16, 20\], torch.bfloat16"
    with pytest.raises(OperatorFault, match=f"lora_shrink of {shapes}.*: the largest error is"):
        self_test.self_test(SHAPES, DEVICE)


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_numbers_that_are_none_and_exceptions_are_faults(monkeypatch, fault):
    def silu_mul(gate_up):
        if fault == "raises":
            raise RuntimeError("misaligned address")
        result = gate_up[:, ::2].clone()
        result[3, 5] = torch.nan
        return result

    monkeypatch.setattr(cuda, "silu_mul", silu_mul)
    (wrong,) = [one for one in checked_operators(SHAPES, DEVICE) if not one.is_right]
    assert wrong.operator == "silu_mul"
    assert wrong.error == torch.inf
    assert ("misaligned address" in str(wrong)) == (fault == "raises")


def test_attention_that_sees_one_key_too_many_is_a_fault(monkeypatch):
    right = cuda.rotary_attention

    def rotary_attention(*arguments, **out):
        step, (window, *options) = arguments[:11], arguments[11:]
        return right(*step, window and window + 1, *options, **out)

    monkeypatch.setattr(cuda, "rotary_attention", rotary_attention)
    wrong = [one for one in checked_operators(SHAPES, DEVICE) if not one.is_right]
    assert {one.operator for one in wrong} == {"rotary_attention"}
    assert all("window 5" in one.shapes for one in wrong)
    assert len(wrong) == 6


def _without_pairs(right):
    return lambda *arguments: right(*arguments[:-1], False)


def _turns_all(right):
    """Elements that stay are zeroed."""

    def attend(qkv, cos, sin, *others):
        missing = 16 - cos.shape[2]
        zeros = cos.new_zeros(len(cos), 1, missing)
        return right(qkv, torch.cat((cos, zeros), 2), torch.cat((sin, zeros), 2), *others)

    return attend


def _zeroes_newest(right):
    """Keys in codes, of which the newest token's lose their scale."""

    def attend(qkv, cos, sin, keys, values, slots, *others):
        result = right(qkv, cos, sin, keys, values, slots, *others)
        return torch.zeros_like(result) if keys.dtype == torch.int8 else result

    return attend


def _stores(change):
    """Attends as it should to rows that are stored as they should not be."""

    def broken(right):
        def attend(qkv, cos, sin, keys, values, slots, *fields):
            q = reference.rotate_and_store(qkv, cos, sin, keys, values, slots, fields[-1])
            change(keys, slots)
            return reference.paged_attention(q, keys, values, *fields[:-1])

        return attend

    return broken


def _next_codes(keys, slots):
    if keys.dtype == torch.int8:
        keys.codes[slots] -= keys.codes[slots].sign()


def _doubled_scales(keys, slots):
    """With half of the codes, as if seven bits were all."""
    if keys.dtype == torch.int8:
        x = load_rows(keys, slots, torch.float32)
        rows = KVCodes.of_rows(quantize_rows(torch.cat((x, 2 * x.abs().amax(-1, keepdim=True)), -1)))
        keys.codes[slots], keys.scales[:, slots] = rows.codes[..., :-1], rows.scales


def _others_too(keys, slots):
    if keys.dtype == torch.int8:
        keys.codes[(slots + 1) % len(keys)] = keys.codes[slots]
    else:
        keys[(slots + 1) % len(keys)] = keys[slots]


def _forgets_padding(right):
    """Rows after those of the step stay as an earlier step left them."""
    return lambda graph, step, size, *others: right(graph, step, len(step.input_ids), *others)


def _looks_further(right):
    def attend(q, keys, values, tables, starts, lengths, num_decodes, block_size, window, *others):
        return right(q, keys, values, tables, starts, lengths, num_decodes, block_size, window and window + 1, *others)

    return attend


def _wrong_for(is_met):
    """Wrong by 1 where the first argument meets a condition."""

    def broken(right):
        def wrong(x, *others):
            result = right(x, *others)
            if not is_met(x):
                return result
            return tuple(y + 1 for y in result) if isinstance(result, tuple) else result + 1

        return wrong

    return broken


def _touches_other_logits(right):
    def forbid(logits, bans, last_token_ids):
        right(logits, bans, last_token_ids)
        logits[0, 5:7] += 0.125

    return forbid


@pytest.mark.parametrize(
    ("operator", "broken", "shapes"),
    [
        ("forbid_tokens", _touches_other_logits, ""),
        ("lora_segments", _wrong_for(lambda mapping: len(mapping) > 2048), "2100 rows"),
        ("lora_shrink", _wrong_for(lambda x: len(x) == 7), " 7 rows (in chunks|by themselves)"),
        ("lora_expand_activated", _wrong_for(lambda v: v.shape[2] == 7), "(silu|gelu_tanh), outputs 72, 7 rows"),
        ("quantized_linear", _wrong_for(lambda x: len(x) < 5), "in groups of"),
        ("rotary_attention", _without_pairs, "6 turned in pairs"),
        ("rotary_attention", _turns_all, "(6|0) turned"),
        ("rotary_attention", _zeroes_newest, "cache torch.int8"),
        ("rotary_attention", _stores(_next_codes), "cache torch.int8"),
        ("rotary_attention", _stores(_doubled_scales), "cache torch.int8"),
        ("rotary_attention", _stores(_others_too), "cache torch.int8"),
        ("paged_attention", _looks_further, "window 5"),
        ("fill_step_inputs", _forgets_padding, "9 rows"),
    ],
)
def test_a_fault_in_one_kind_of_step_is_found(monkeypatch, operator, broken, shapes):
    monkeypatch.setattr(cuda, operator, broken(getattr(cuda, operator)))
    in_codes = dataclasses.replace(SHAPES, kv_dtype=torch.int8, more_rows=(7,))
    wrong = [one for one in checked_operators(in_codes, DEVICE, operators={operator}) if not one.is_right]
    assert wrong
    assert all(re.search(shapes, one.shapes) for one in wrong)


def _kernels_are_right(monkeypatch):
    """Plain functions in the place of kernels, which take the interpreter long."""
    for name, function in PLAIN_OPERATORS.items():
        monkeypatch.setattr(cuda, name, function)


def _raises(*_):
    raise RuntimeError("no kernel image is available")


def test_the_load_tells_each_comparison_and_stops_at_an_operator_that_raises(monkeypatch):
    _kernels_are_right(monkeypatch)
    seen = []
    num_comparisons = self_test.self_test(SHAPES, DEVICE, lambda *step: seen.append(step))
    assert [step[:2] for step in seen] == [(n, num_comparisons) for n in range(num_comparisons)]
    assert seen[0][2] == "lora_shrink"
    monkeypatch.setattr(cuda, "lora_shrink", _raises)
    with pytest.raises(OperatorFault, match=r"lora_shrink of .*72 inputs.*: RuntimeError: no kernel image is"):
        self_test.self_test(SHAPES, DEVICE)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_operators_pass_the_comparisons(monkeypatch, dtype, stored):
    """They stand for kernels in tests of the engine."""
    assert set(PLAIN_OPERATORS) == set(cuda.__all__)
    _kernels_are_right(monkeypatch)
    shapes = dataclasses.replace(SHAPES, dtype=dtype, **stored)
    assert [str(one) for one in checked_operators(shapes, DEVICE) if not one.is_right] == []
