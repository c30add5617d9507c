"""`lora_embedding`: the first half of a batched LoRA update of embeddings, from tokens to the rank."""

from __future__ import annotations

import torch

from multilora_kernels.adapter_codes import CODE_BITS, gather_b
from multilora_kernels.tables import LoRATables


def lora_embedding(
    token_ids: torch.Tensor, token_lora_mapping: torch.Tensor, tables: LoRATables, column: int
) -> torch.Tensor:
    """v[0, 0, t, :r] = the row of token t in the A of its adapter, which lies as `[vocabulary, rank]`.

    What `lora_shrink` would give for x of one 1 and zeros, and as undefined for base tokens and from column r up:
    `lora_expand` is the second half. PyTorch on the device; it reads r values a token.

    token_ids: [num_tokens] int64, within the vocabulary. token_lora_mapping: [num_tokens] int64, -1 for the base model.
    Codes of such an A lie as the codes of a B. Returns [1, 1, num_tokens, max_rank], float32.
    """
    lora_index = token_lora_mapping.clamp(min=0)
    ranks, offsets = tables.rank[lora_index, column].long(), tables.a_offset[lora_index, column]
    is_adapted = (token_lora_mapping >= 0) & (ranks > 0)
    ranks, offsets = torch.where(is_adapted, ranks, 1), torch.where(is_adapted, offsets, 0)
    rows = torch.where(is_adapted, token_ids, 0)
    if tables.arena.dtype in CODE_BITS:
        v = gather_b(tables.arena, offsets, rows, ranks, tables.max_rank)
    else:
        places = (offsets + rows * ranks)[:, None] + torch.arange(tables.max_rank, device=offsets.device)
        v = tables.arena[places.clamp_(max=tables.arena.numel() - 1)].float()
    return v[None, None]
