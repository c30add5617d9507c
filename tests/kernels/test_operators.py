"""The operators as torch sees them: schema, fake implementation, torch.compile."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import FUSED, MIXED_RANKS, make_case
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.synthetic_batches import LinearShape
from multilora_kernels import load_cpu_kernels, lora_apply, lora_expand, lora_shrink, operators
from multilora_kernels.cpu import apply_directly


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
        lora_apply(x, y, case.tables, 0, FUSED.slice_sizes, case.segments)
        return y + 1

    eager, compiled = case.y.clone(), case.y.clone()
    expected = apply(case.x, eager)
    actual = torch.compile(apply, fullgraph=True, backend="aot_eager")(case.x, compiled)
    assert torch.equal(actual, expected)
    assert torch.equal(compiled, eager)


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
    separate, together, operator = case.y.clone(), case.y.clone(), case.y.clone()
    v = lora_shrink(case.x, case.tables, 0, shape.num_slices, case.segments)
    lora_expand(v, separate, case.tables, 0, shape.slice_sizes, case.segments)
    lora_apply(case.x, together, case.tables, 0, shape.slice_sizes, case.segments)
    operators.call_apply(case.x, operator, case.tables, 0, shape.slice_sizes, case.segments)
    assert torch.equal(separate, together)
    assert torch.equal(separate, operator)
    assert not torch.equal(separate, case.y)


def test_apply_takes_the_short_way_only_where_the_dispatcher_has_nothing_to_do():
    case = make_case()

    def is_direct(x: torch.Tensor, y: torch.Tensor) -> bool:
        return apply_directly(x, y, case.tables, 0, list(FUSED.slice_sizes), case.segments)

    assert is_direct(case.x, case.y)
    with torch.inference_mode():
        assert is_direct(case.x.clone(), case.y.clone())
    before = case.y.clone()
    assert not is_direct(case.x.clone().requires_grad_(), case.y)
    with FakeTensorMode() as mode:
        assert not is_direct(mode.from_tensor(case.x), mode.from_tensor(case.y))
    with _Operators():
        assert not is_direct(case.x, case.y)
    with torch.profiler.profile():
        assert not is_direct(case.x, case.y)
    assert torch.equal(case.y, before)


def test_a_dispatch_mode_sees_apply_as_one_operator():
    case = make_case()
    with _Operators() as mode:
        lora_apply(case.x, case.y, case.tables, 0, FUSED.slice_sizes, case.segments)
    assert mode.seen == [torch.ops.multilora.lora_apply.default]


def test_apply_says_what_it_was_given_instead_of_a_tensor():
    case = make_case()
    broken = case.tables._replace(arena=None)
    with pytest.raises(TypeError, match="expected a tensor, not NoneType"):
        lora_apply(case.x, case.y, broken, 0, FUSED.slice_sizes, case.segments)


class _Operators(TorchDispatchMode):
    """Records the operators that the dispatcher calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
