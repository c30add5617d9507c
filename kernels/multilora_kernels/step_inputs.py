"""`fill_step_inputs`: a step's inputs to the memory that captured graphs read them from, in one launch on a GPU."""

from __future__ import annotations

from multilora_kernels.dispatch import operator
from multilora_kernels.step_inputs_reference import StepInputs

__all__ = ["StepInputs", "fill_step_inputs"]


def fill_step_inputs(graph: StepInputs, step: StepInputs, size: int, scratch_block: int, block_size: int) -> None:
    """Copy a step's inputs to the first rows, and make the others up to `size` padding.

    A row of padding is the token 0 of the base model at position 0, the only one of a sequence in the scratch block.
    Elements of `graph.logits_indices` behind the step's are 0: a graph may lack a row that an earlier step wanted.
    """
    operator("fill_step_inputs", step.input_ids)(graph, step, size, scratch_block, block_size)
