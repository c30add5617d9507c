"""`penalise_tokens` and `forbid_tokens` in OpenAI Triton, one launch each; see `multilora_kernels.penalties`.

Compiled without the fusion of products and sums, which would round otherwise than a CPU does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.penalties_reference import LARGEST_LOGIT

_BLOCK = 1024
_LIMIT = tl.constexpr(LARGEST_LOGIT)


def penalise_tokens(
    logits: torch.Tensor,
    counts: torch.Tensor,
    places: torch.Tensor,
    last_token_ids: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """See `multilora_kernels.penalties.penalise_tokens`."""
    num_rows, vocab = places.shape[1], logits.shape[1]
    assert logits.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (counts, places, last_token_ids, penalties))
    if num_rows:
        penalise_kernel[num_rows, cdiv(vocab, _BLOCK)](
            logits,
            counts,
            places,
            last_token_ids,
            penalties,
            num_rows,
            vocab,
            logits.stride(0),
            **penalise_constants(),
        )


def forbid_tokens(logits: torch.Tensor, bans: torch.Tensor, last_token_ids: torch.Tensor) -> None:
    """See `multilora_kernels.penalties.forbid_tokens`."""
    assert logits.stride(1) == 1
    assert bans.is_contiguous()
    assert last_token_ids.is_contiguous()
    if num_bans := bans.shape[1]:
        constants = forbid_constants()
        grid = (cdiv(num_bans, constants["BLOCK"]),)
        forbid_kernel[grid](logits, bans, last_token_ids, num_bans, logits.stride(0), **constants)


def penalise_constants() -> dict[str, Any]:
    """The constants of the kernel."""
    return {"BLOCK": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}


def forbid_constants() -> dict[str, Any]:
    """The constants of the kernel."""
    return {"BLOCK": 128, "num_warps": 4}


@triton.jit(do_not_specialize=["num_rows"])
def penalise_kernel(
    logits_ptr,
    counts_ptr,
    place_ptr,
    last_token_ptr,
    parameters_ptr,
    num_rows,
    vocab,
    stride_lm,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK tokens of a row. Of the logits it reads those alone that it changes."""
    i = tl.program_id(0)
    row = tl.load(place_ptr + i)
    counts_row = counts_ptr + tl.load(place_ptr + num_rows + i) * vocab
    is_counted = tl.load(place_ptr + 2 * num_rows + i) != 0
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_row + columns, mask=columns < vocab, other=0)
    is_last = (columns == tl.load(last_token_ptr + row)) & is_counted
    count = tl.where(is_last, count + 2, count)
    tl.store(counts_row + columns, count, mask=is_last)
    has_token = count > 0
    x = tl.load(logits_ptr + row * stride_lm + columns, mask=has_token, other=0.0)
    repetition = tl.load(parameters_ptr + 3 * i).to(tl.float32)
    presence, frequency = tl.load(parameters_ptr + 3 * i + 1), tl.load(parameters_ptr + 3 * i + 2)
    if repetition != 1.0:
        x = _limited(tl.where(x < 0, x * repetition, tl.div_rn(x, repetition + tl.zeros((BLOCK,), tl.float32))))
    if (presence != 0.0) | (frequency != 0.0):
        penalty = (frequency * (count >> 1).to(tl.float64) + presence).to(tl.float32)
        x = tl.where(count >= 2, _limited(x - penalty), x)
    tl.store(logits_ptr + row * stride_lm + columns, x, mask=has_token)


@triton.jit(do_not_specialize=["num_bans"])
def forbid_kernel(logits_ptr, ban_ptr, last_token_ptr, num_bans, stride_lm, BLOCK: tl.constexpr):
    """One program: BLOCK bans."""
    bans = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = bans < num_bans
    row = tl.load(ban_ptr + bans, mask=mask, other=0)
    token = tl.load(ban_ptr + num_bans + bans, mask=mask, other=0)
    trigger = tl.load(ban_ptr + 2 * num_bans + bans, mask=mask, other=0)
    last_token = tl.load(last_token_ptr + row, mask=mask & (trigger >= 0), other=0)
    is_forbidden = mask & ((trigger < 0) | (trigger == last_token))
    tl.store(logits_ptr + row * stride_lm + token, -float("inf"), mask=is_forbidden)


@triton.jit
def _limited(x):
    """Within +-_LIMIT; a NaN stays one."""
    x = tl.where(x > _LIMIT, _LIMIT, x)
    return tl.where(x < -_LIMIT, -_LIMIT, x)
