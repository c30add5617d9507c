"""Rounds a model's linears while a text passes through the model once.

Each linear is rounded for the inputs that it gets from the rounded linears before it. The activations of a linear are
dropped as soon as it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from multilora_engine.errors import ConfigError
from multilora_engine.quantize.checkpoint import compress, decompress
from multilora_engine.quantize.compensation import Activations, activations_of
from multilora_engine.quantize.schemes import HEAD, Scheme


class CalibratedRounding:
    """Rounds the linears of `schemes` in the order of the pass. The head of the model stays: it may be the embeddings.

    states: the tensors of each rounded linear as compressed-tensors stores them, on the CPU.
    """

    def __init__(
        self, schemes: Mapping[str, Scheme], window_lengths: list[int], on_progress: Callable[[int, int], None]
    ) -> None:
        """on_progress: called with (linears done, linears in all)."""
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        self._schemes = schemes
        self._lengths = window_lengths
        self._on_progress = on_progress
        self._last_inputs: torch.Tensor | None = None
        self._last_activations: Activations | None = None

    def round(self, name: str, module: torch.nn.Linear, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Round the linear `name`, which is about to compute. Returns other inputs for it, or None for `arguments`."""
        (inputs,) = arguments
        scheme = self._schemes[name]
        if not module.weight.isfinite().all():
            raise ConfigError(f"the weight of {name} has values that are not finite; it cannot be quantised")
        state = compress(module.weight, scheme, self._activations(name, inputs))
        self.states[name] = {key: tensor.cpu() for key, tensor in state.items()}
        self._on_progress(len(self.states), len(self._schemes))
        if name == HEAD:
            return (inputs[:, -1:],)  # Nobody reads the logits here, and logits of all tokens may not fit into memory.
        rounded = decompress(state, scheme.for_modules()).to(module.weight)
        module.weight = torch.nn.Parameter(rounded, requires_grad=False)
        return None

    def _activations(self, name: str, inputs: torch.Tensor) -> Activations:
        if inputs is not self._last_inputs or self._last_activations is None:  # Q, K and V have the same, for one.
            self._last_inputs, self._last_activations = inputs, activations_of(self._moments(name, inputs))
        return self._last_activations

    def _moments(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """The mean of x x^T over all tokens. inputs: [windows, tokens, inputs]; a window may have fewer tokens."""
        moments = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float32)
        for window, length in zip(inputs, self._lengths, strict=True):
            x = window[:length].float()
            moments.addmm_(x.t(), x)
        moments /= sum(self._lengths)
        if not moments.isfinite().all():
            raise ConfigError(f"{name} has inputs that are not finite on the calibration text; calibrate with another")
        return moments


@torch.inference_mode()
def round_calibrated(
    model: PreTrainedModel,
    schemes: Mapping[str, Scheme],
    windows: list[torch.Tensor],
    on_progress: Callable[[int, int], None],
) -> Mapping[str, dict[str, torch.Tensor]]:
    """The tensors of each linear of `schemes`, rounded for the inputs that the windows give it. `model` changes.

    windows: token ids, each int64 [1, tokens]. A shorter window is padded at its end, where no token of it looks.
    """
    lengths = [window.shape[1] for window in windows]
    rounding = CalibratedRounding(schemes, lengths, on_progress)
    token_ids = torch.cat([F.pad(window, (0, max(lengths) - window.shape[1])) for window in windows])
    hooks: list[Any] = [
        model.get_submodule(name).register_forward_pre_hook(partial(rounding.round, name)) for name in schemes
    ]
    try:
        model(token_ids.to(model.device), use_cache=False, logits_to_keep=0 if HEAD in schemes else 1)
    finally:
        for hook in hooks:
            hook.remove()
    return rounding.states
