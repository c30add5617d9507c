"""The operators as torch sees them: schema, fake implementation, torch.compile."""

from __future__ import annotations

import torch
from support.lora_cases import FUSED, make_case
from torch import library

from multilora_kernels import load_cpu_kernels, lora_apply, lora_expand, lora_shrink, operators


def _arguments(case):
    return *operators.table_fields(case.tables), *operators.segment_fields(case.segments)


def test_shrink_passes_the_checks_of_torch_for_custom_operators():
    load_cpu_kernels()
    case = make_case()
    arguments = (case.x.nan_to_num(), 0, 3, *_arguments(case))
    library.opcheck(torch.ops.multilora.lora_shrink.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_expand_passes_the_checks_of_torch_for_custom_operators():
    case = make_case(ranks=(8,), base_share=0)
    v = lora_shrink(case.x, case.tables, 0, 3, case.segments)
    arguments = (v, case.y, 0, FUSED.slice_sizes, *_arguments(case))
    library.opcheck(torch.ops.multilora.lora_expand.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_function_has_no_graph_break_and_the_same_result():
    case = make_case()

    def apply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        v = lora_shrink(x, case.tables, 0, 3, case.segments)
        lora_expand(v, y, case.tables, 0, FUSED.slice_sizes, case.segments)
        return y + 1

    eager, compiled = case.y.clone(), case.y.clone()
    expected = apply(case.x, eager)
    actual = torch.compile(apply, fullgraph=True, backend="aot_eager")(case.x, compiled)
    assert torch.equal(actual, expected)
    assert torch.equal(compiled, eager)


def test_apply_is_shrink_and_expand_in_one_call():
    case = make_case("zipf", 37, magnitudes=True)
    separate, together = case.y.clone(), case.y.clone()
    v = lora_shrink(case.x, case.tables, 0, 3, case.segments)
    lora_expand(v, separate, case.tables, 0, FUSED.slice_sizes, case.segments)
    lora_apply(case.x, together, case.tables, 0, FUSED.slice_sizes, case.segments)
    assert torch.equal(separate, together)
    assert not torch.equal(separate, case.y)
