"""The operators inside a captured CUDA graph; collected where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import FUSED, Case, make_case
from support.synthetic_batches import POPULARITIES, choose_adapters

from multilora_kernels import lora_expand, lora_shrink, step_segments
from multilora_kernels.cuda.block_sizes import capability
from multilora_kernels.cuda.dependent_launch import LEAST_CAPABILITY, launches_dependently

pytestmark = pytest.mark.gpu
_NUM_TOKENS = 32


def _apply(case: Case, mapping: torch.Tensor, has_prompts: bool) -> torch.Tensor:
    """One step as the engine captures it: the segments are computed inside the graph too."""
    segments = step_segments(mapping, case.tables, has_prompts)
    v, y = lora_shrink(case.x, case.tables, 0, FUSED.num_slices, segments), case.y.clone()
    lora_expand(v, y, case.tables, 0, FUSED.slice_sizes, segments)
    return y


@pytest.mark.parametrize("has_prompts", [False, True])
def test_one_graph_serves_every_mix_of_adapters_with_the_bits_of_eager_execution(has_prompts):
    case = make_case("distinct", _NUM_TOKENS, base_share=0, lora_dtype=torch.bfloat16, dtype=torch.bfloat16).to("cuda")
    mapping = case.mapping.clone()
    _apply(case, mapping, has_prompts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _apply(case, mapping, has_prompts)
    for seed, popularity in enumerate(POPULARITIES):
        mapping.copy_(choose_adapters(popularity, _NUM_TOKENS, torch.Generator().manual_seed(seed)))
        mapping[seed] = -1
        graph.replay()
        assert torch.equal(captured, _apply(case, mapping, has_prompts))


def test_a_gpu_that_has_dependent_launches_passes_their_trial():
    device = torch.zeros(1, device="cuda").device
    assert launches_dependently(device) == (capability(device) >= LEAST_CAPABILITY)
