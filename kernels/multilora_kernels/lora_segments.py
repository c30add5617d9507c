"""`lora_segments`: the tokens of a step sorted by adapter, once for all layers; `step_segments`: or its rows."""

from __future__ import annotations

import torch

from multilora_kernels.dispatch import compiled_for, gpu_operator
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.segments import LoRASegments, capacity_of, chunk_size_of, reference_segments, rows_of
from multilora_kernels.tables import LoRATables


def lora_segments(token_lora_mapping: torch.Tensor, max_loras: int, chunk_size: int | None = None) -> LoRASegments:
    """Sort tokens by adapter and cut the runs into chunks, without synchronising the device.

    On a CPU it is one call: some twenty of PyTorch's take a step of a small model 0.4 ms, whose weights have driven
    PyTorch's code out of the caches.

    token_lora_mapping: [num_tokens] int32 or int64, each -1 (base model) or 0 .. max_loras - 1.
    Every run of `n` tokens gives `ceil(n / chunk_size)` chunks; the order inside a run is the batch's order.
    chunk_size: `CHUNK_SIZE` or `PREFILL_CHUNK_SIZE` by the number of tokens unless given.
    """
    num_tokens = token_lora_mapping.numel()
    chunk_size = chunk_size or chunk_size_of(num_tokens)
    capacity = capacity_of(num_tokens, max_loras, chunk_size)
    if has_gpu_operators(token_lora_mapping.device) and num_tokens:
        # Imported here: Triton comes with the CUDA builds of torch only.
        from multilora_kernels.cuda.segments import MAX_TOKENS

        if num_tokens <= MAX_TOKENS:
            segment = gpu_operator("lora_segments")
            permutation, starts, lengths, indices = segment(token_lora_mapping, max_loras, chunk_size, capacity)
            return LoRASegments(permutation, starts, lengths, indices, num_tokens, chunk_size)
    library = compiled_for(token_lora_mapping)
    if library is not None:
        sort = library.lora_segments
        permutation, starts, lengths, indices = sort(token_lora_mapping.contiguous(), max_loras, chunk_size, capacity)
        return LoRASegments(permutation, starts, lengths, indices, num_tokens, chunk_size)
    return reference_segments(token_lora_mapping, max_loras, chunk_size, capacity)


def step_segments(token_lora_mapping: torch.Tensor, tables: LoRATables, has_prompts: bool) -> LoRASegments:
    """The tokens of a step as its linears take them: each row by itself, or `lora_segments`.

    On a GPU, few rows without a prompt, of which several seldom share an adapter, are taken by themselves. The table
    of the GPU says how many (`cuda.block_sizes.takes_rows`). Their adapters play no part: a captured graph replays for
    any mix.
    """
    if has_gpu_operators(token_lora_mapping.device) and not has_prompts:
        from multilora_kernels.cuda.block_sizes import capability, takes_rows

        if takes_rows(len(token_lora_mapping), tables.max_rank, capability(token_lora_mapping.device)):
            return rows_of(token_lora_mapping)
    return lora_segments(token_lora_mapping, max_loras=len(tables.rank))
