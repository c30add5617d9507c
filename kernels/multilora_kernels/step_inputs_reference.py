"""`StepInputs`, and `fill_step_inputs` in plain PyTorch: the oracle of the tests, and the path of a CPU."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_BASE_MODEL = -1


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a graph, or of a step. All are int64 and on one device.

    input_ids, positions, lora_mapping, slot_mapping, num_keys: [rows]. logits_indices: [at most rows].
    block_tables: [rows, blocks]. None for an input that no graph reads. An input that the graph has and the step lacks
    stays as it was.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    lora_mapping: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    num_keys: torch.Tensor | None = None
    logits_indices: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None

    @property
    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        """All inputs except the block tables, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))[:-1]


def fill_step_inputs(graph: StepInputs, step: StepInputs, size: int, scratch_block: int, block_size: int) -> None:
    """See `multilora_kernels.step_inputs.fill_step_inputs`."""
    padding = (0, 0, _BASE_MODEL, scratch_block * block_size, 1, 0)
    for target, source, value in zip(graph.vectors, step.vectors, padding, strict=True):
        if target is not None and source is not None:
            target[: len(source)] = source
            target[len(source) : size] = value
    if graph.block_tables is not None and step.block_tables is not None:
        num_rows, num_blocks = step.block_tables.shape
        graph.block_tables[:num_rows, :num_blocks] = step.block_tables
        graph.block_tables[num_rows:size, 0] = scratch_block
