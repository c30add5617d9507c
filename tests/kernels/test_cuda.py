"""What only the GPU operators promise; collected on a GPU and in Triton's interpreter."""

from __future__ import annotations

import torch
from support.lora_cases import TOLERANCES, Case, make_case

from multilora_kernels import lora_segments
from multilora_kernels.testing import LinearShape

_LONG = LinearShape(in_features=2500, slice_sizes=(40, 24))


def _run(implementation, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = case.to(implementation.device)
    v = implementation.lora_shrink(on_device.x, on_device.tables, 0, case.shape.num_slices, on_device.segments)
    y = on_device.y.clone()
    implementation.lora_expand(v, y, on_device.tables, 0, case.shape.slice_sizes, on_device.segments)
    return v, y.cpu()


def test_the_parts_of_a_long_sum_are_added_by_expand(implementation):
    case = make_case("zipf", 12, _LONG, ranks=(8, 0, 20))
    v, y = _run(implementation, case)
    assert v.shape[0] == 3
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(y.double(), case.expected_y(case.expected_v()), rtol=rtol, atol=atol)


def test_prefill_chunks_give_the_same_result_from_one_part(implementation):
    case = make_case("skewed", 70, _LONG, ranks=(8, 0, 20))
    segments = lora_segments(case.mapping, case.tables.rank.shape[0], chunk_size=64)
    v, y = _run(implementation, Case(case.shape, case.tables, case.mapping, segments, case.x, case.y))
    assert v.shape[0] == 1
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(y.double(), case.expected_y(case.expected_v()), rtol=rtol, atol=atol)
