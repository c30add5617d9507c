"""The self-test finds operators that compute wrongly; collected on a GPU and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels import CodeType, attention, cuda, operators, self_test
from multilora_kernels.self_test import OperatorFault, OperatorShapes, checked_operators

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
    code_types=((CodeType.INT4, 24), (CodeType.INT8, 72), (CodeType.FP8, 72)),
)


def test_right_operators_pass():
    checked = list(checked_operators(SHAPES, DEVICE))
    names = ["lora_shrink", "lora_expand", "lora_apply", "lora_segments", "rotary_attention"]
    assert list(dict.fromkeys(one.operator for one in checked)) == [
        *names,
        "quantized_linear",
        "add_rms_norm",
        "add_layer_norm",
        "silu_mul",
        "gelu_tanh_mul",
        "gelu_tanh",
        "penalise_tokens",
        "forbid_tokens",
        "sample_tokens",
    ]
    assert [str(one) for one in checked if not one.is_right] == []


def test_a_load_stops_at_a_sum_that_lacks_one_element_and_names_it(monkeypatch):
    right = self_test.lora_shrink

    def lora_shrink(x, *arguments):
        without_last = x.clone()
        without_last[:, -1] = 0
        return right(without_last, *arguments)

    monkeypatch.setattr(self_test, "lora_shrink", lora_shrink)
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
    right = operators.rotary_attention

    def rotary_attention(*arguments):
        step, (window, *options) = arguments[:11], arguments[11:]
        return right(*step, window and window + 1, *options)

    monkeypatch.setattr(attention.operators, "rotary_attention", rotary_attention)
    wrong = [one for one in checked_operators(SHAPES, DEVICE) if not one.is_right]
    assert {one.operator for one in wrong} == {"rotary_attention"}
    assert all("window 5" in one.shapes for one in wrong)
    assert len(wrong) == 6
