"""The choice of tokens from logits: one operator. A CPU, a GPU and plain PyTorch choose the same token.

A token's weight is w = e^((logit - largest logit) * (1 / temperature)) in float32, by the steps of `cpu/exponential.h`
with fused multiply-adds, and zero below e^-87. Then it is rounded to a multiple of `WEIGHT_UNIT`. Sums of weights are
exact, as integers of this unit, so they depend neither on the order of addition nor on the width of a vector.
Thresholds, shares and ties are all defined by comparisons of weights and of such sums, so an implementation may search
as it likes. A token with a weight of at most half a unit is never chosen. Processors without fused multiply-adds may
round a weight's last bit differently.
"""

from __future__ import annotations

import numpy as np
import torch

from multilora_kernels.dispatch import compiled_for, operator
from multilora_kernels.sampling_rule import SamplingRule

__all__ = ["SamplingRule", "most_probable", "rule_parameters", "sample_tokens"]


def sample_tokens(logits: torch.Tensor, rules: list[SamplingRule] | torch.Tensor) -> torch.Tensor:
    """Choose a token for each row. Returns int64 [rows] on the device of the logits. The host does not wait.

    A row's token depends only on its own logits and rule. For a row with NaN, or with only -inf, it may be any token.

    logits: float32 [rows, vocab], contiguous along a row. rules: one for each row, or their `rule_parameters` on the
    device of the logits. Raises RuntimeError for other shapes and dtypes.
    """
    parameters = rules if isinstance(rules, torch.Tensor) else rule_parameters(rules, logits.device)
    return operator("sample_tokens", logits)(logits, parameters)  # type: ignore[no-any-return]


def most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The first token of each row with the largest logit, int64 [rows], and whether all of these logits are sound.

    logits: float32 [rows, vocab], contiguous along a row, on the host. A NaN is larger than all numbers. A sound logit
    is finite and not zero.
    """
    library = compiled_for(logits)
    if library is not None:
        return library.most_probable(logits)  # type: ignore[no-any-return]
    rows = logits.numpy()
    token_ids = rows.argmax(axis=-1)
    chosen = rows[np.arange(len(rows)), token_ids]
    return torch.from_numpy(token_ids), bool(np.isfinite(chosen).all() and chosen.all())


def rule_parameters(rules: list[SamplingRule], device: torch.device) -> torch.Tensor:
    """The fields of the rules on a device, float64 [rows, 5]. The host does not wait."""
    parameters = torch.tensor(rules, dtype=torch.float64).view(len(rules), len(SamplingRule._fields))
    # From pinned memory the copy queues after the device's earlier work, and the host does not wait.
    return parameters.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else parameters
