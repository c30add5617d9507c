"""Measures how well a checkpoint's model predicts a text.

The model is transformers' own, so that nothing of the engine judges its own checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from multilora_engine.models.loader import stored_dtype


def load_float_model(checkpoint: Path, device: torch.device) -> PreTrainedModel:
    """The model, in the dtype in which the checkpoint is stored."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=stored_dtype(checkpoint), local_files_only=True, trust_remote_code=False
    )
    return cast(PreTrainedModel, model.to(device).eval())


def replace_weights(model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace the weights of the modules that `weights` names. This unties a head that was the embeddings."""
    for module, weight in weights:
        replaced = model.get_parameter(f"{module}.weight")
        model.get_submodule(module).weight = torch.nn.Parameter(weight.to(replaced), requires_grad=False)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, windows: list[torch.Tensor], on_progress: Callable[[int, int], None]) -> float:
    """exp of the mean of -log P(token | the tokens before it in its window), without each window's first token.

    Infinite if no float holds it. on_progress: called with (windows done, windows in all).
    """
    total, num_tokens = 0.0, 0
    for done, window in enumerate(windows, start=1):
        token_ids = window.to(model.device)
        logits = model(token_ids, use_cache=False).logits[0, :-1].float()
        total += F.cross_entropy(logits, token_ids[0, 1:], reduction="sum").item()
        num_tokens += window.shape[1] - 1
        on_progress(done, len(windows))
    try:
        return math.exp(total / num_tokens)
    except OverflowError:  # The mean is above 709.
        return math.inf
