"""`fill_step_inputs` in OpenAI Triton: one launch in place of eight to fourteen; see `step_inputs`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.step_inputs_reference import StepInputs


def fill_step_inputs(graph: StepInputs, step: StepInputs, size: int, scratch_block: int, block_size: int) -> None:
    """See `multilora_kernels.step_inputs.fill_step_inputs`."""
    pairs = list(zip(graph.vectors, step.vectors, strict=True))
    tables, of_step = graph.block_tables, step.block_tables
    if tables is None or of_step is None:
        tables = of_step = None
    vectors = [tensor for pair in pairs for tensor in (pair if None not in pair else (None, None))]
    assert all(tensor.stride(-1) == 1 for tensor in (*vectors, tables, of_step) if tensor is not None)
    fill_kernel[(size,)](
        *vectors,
        tables,
        of_step,
        len(step.input_ids),
        0 if step.logits_indices is None else len(step.logits_indices),
        scratch_block,
        scratch_block * block_size,
        *_shape(tables, of_step),
        **fill_constants(),
    )


def _shape(tables: torch.Tensor | None, of_step: torch.Tensor | None) -> tuple[int, int, int]:
    """Blocks of a row of the step's tables, and the distances of rows in the graph's and in these."""
    if tables is None or of_step is None:
        return 0, 0, 0
    return of_step.shape[1], tables.stride(0), of_step.stride(0)


def fill_constants() -> dict[str, Any]:
    """The constants of the kernel."""
    return {"BLOCK": 128, "num_warps": 1}


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_logits", "scratch_block", "scratch_slot", "num_blocks", "stride_gm", "stride_sm"),
    ]
)
def fill_kernel(
    graph_input_ids_ptr,
    input_ids_ptr,
    graph_positions_ptr,
    positions_ptr,
    graph_lora_mapping_ptr,
    lora_mapping_ptr,
    graph_slots_ptr,
    slots_ptr,
    graph_num_keys_ptr,
    num_keys_ptr,
    graph_logits_indices_ptr,
    logits_indices_ptr,
    graph_tables_ptr,
    tables_ptr,
    num_rows,
    num_logits,
    scratch_block,
    scratch_slot,
    num_blocks,
    stride_gm,
    stride_sm,
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    _fill(graph_input_ids_ptr, input_ids_ptr, row, num_rows, 0)
    _fill(graph_positions_ptr, positions_ptr, row, num_rows, 0)
    if graph_lora_mapping_ptr is not None:
        _fill(graph_lora_mapping_ptr, lora_mapping_ptr, row, num_rows, -1)
    if graph_slots_ptr is not None:
        _fill(graph_slots_ptr, slots_ptr, row, num_rows, scratch_slot)
    if graph_num_keys_ptr is not None:
        _fill(graph_num_keys_ptr, num_keys_ptr, row, num_rows, 1)
    if graph_logits_indices_ptr is not None:
        _fill(graph_logits_indices_ptr, logits_indices_ptr, row, num_logits, 0)
    if graph_tables_ptr is not None:
        if row < num_rows:
            for first in range(0, num_blocks, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                mask = columns < num_blocks
                blocks = tl.load(tables_ptr + row * stride_sm + columns, mask=mask, other=0)
                tl.store(graph_tables_ptr + row * stride_gm + columns, blocks, mask=mask)
        else:
            tl.store(graph_tables_ptr + row * stride_gm, tl.full((), scratch_block, tl.int64))


@triton.jit
def _fill(target_ptr, source_ptr, row, num_rows, padding):
    if row < num_rows:
        tl.store(target_ptr + row, tl.load(source_ptr + row))
    else:
        tl.store(target_ptr + row, tl.full((), padding, tl.int64))
