"""The choice of tokens from logits: one operator, for which the CPU, a GPU and plain PyTorch give the same token.

A token's weight is w = e^((logit - largest logit) * (1 / temperature)) in float32, by the steps of `cpu/exponential.h`
with fused multiply-adds, zero below e^-87, and then rounded to a multiple of `WEIGHT_UNIT` where it has finer bits.
Sums of weights are exact, as integers of that unit, so they depend neither on the order of addition nor on the width of
a vector. Everything else, thresholds, shares and ties, is defined by comparisons of weights and of such sums, so an
implementation may search as it likes. A token whose weight is at most half a unit is never chosen. Processors without
fused multiply-adds may round a weight's last bit otherwise.
"""

from __future__ import annotations

import numpy as np
import torch

from multilora_kernels.dispatch import compiled_for, operator
from multilora_kernels.sampling_rule import SamplingRule

__all__ = ["SamplingRule", "most_probable", "rule_parameters", "sample_tokens"]


def sample_tokens(logits: torch.Tensor, rules: list[SamplingRule] | torch.Tensor) -> torch.Tensor:
    """The tokens of all rows, int64 [rows], on the device of the logits; the host does not wait for it.

    logits: float32 [rows, vocab], contiguous along a row, with a rule each; RuntimeError otherwise. A row's token
    depends on its own logits and rule alone. Of a row with NaN, or where every logit is -inf, it is any. rules: may be
    their `rule_parameters` on that device.
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
    """The fields of rules on a device, float64 [rows, 5]; the host does not wait for it."""
    parameters = torch.tensor(rules, dtype=torch.float64).view(len(rules), len(SamplingRule._fields))
    # From pinned memory the copy queues behind the device's earlier work instead of waiting for it.
    return parameters.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else parameters
