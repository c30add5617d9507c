"""`fill_step_inputs`: copies a step's inputs to the memory that captured graphs read, by one kernel on a GPU."""

from __future__ import annotations

from multilora_kernels.dispatch import operator
from multilora_kernels.step_inputs_reference import StepInputs

__all__ = ["StepInputs", "fill_step_inputs"]


def fill_step_inputs(graph: StepInputs, step: StepInputs, size: int, scratch_block: int, block_size: int) -> None:
    """Copy a step's inputs to the first rows, and fill the other rows up to `size` with padding.

    A row of padding is token 0 of the base model at position 0: the only token of a sequence in the scratch block. The
    elements of `graph.logits_indices` after the step's become 0, because the graph may lack a row that an earlier step
    wanted.
    """
    operator("fill_step_inputs", step.input_ids)(graph, step, size, scratch_block, block_size)
