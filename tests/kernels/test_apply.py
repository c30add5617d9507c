"""`lora_apply` is `lora_shrink` and `lora_expand` in one call."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import FUSED, MIXED_RANKS, make_case

from benchmarks.lora_workloads import LinearShape
from multilora_kernels import lora_apply, lora_expand, lora_shrink

WIDE = LinearShape(in_features=520, slice_sizes=(600, 72))


@pytest.mark.parametrize(
    ("popularity", "num_tokens", "shape", "ranks"),
    [
        ("zipf", 37, FUSED, MIXED_RANKS),
        ("distinct", 8, WIDE, (16, 8)),
        ("skewed", 40, WIDE, (16, 3)),
        ("identical", 9, WIDE, (16, 8)),
    ],
    ids=["little work", "even work", "uneven work", "one adapter"],
)
@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_is_shrink_and_expand_in_one_call(popularity, num_tokens, shape, ranks, shared_a, dtype):
    case = make_case(popularity, num_tokens, shape, ranks, dtype=dtype, magnitudes=True, shared_a=shared_a)
    separate, together = case.y.clone(), case.y.clone()
    v = lora_shrink(case.x, case.tables, 0, shape.num_slices, case.segments)
    lora_expand(v, separate, case.tables, 0, shape.slice_sizes, case.segments)
    lora_apply(case.x, together, case.tables, 0, shape.slice_sizes, case.segments)
    assert torch.equal(separate, together)
    assert not torch.equal(separate, case.y)


def test_apply_says_what_it_was_given_instead_of_a_tensor():
    case = make_case()
    broken = case.tables._replace(arena=None)
    with pytest.raises(TypeError, match="expected a tensor, not NoneType"):
        lora_apply(case.x, case.y, broken, 0, FUSED.slice_sizes, case.segments)
