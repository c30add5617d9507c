"""Which modules of a quantised checkpoint adapters may change, as its author says.

`lora_compatible` and `lora_target_modules` stand in config.json, in its `quantization_config`, or in lora_metadata.json
beside it. No version of compressed-tensors has written them; checkpoints of a proposal to llm-compressor (pull request
2037) have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multilora_wire.quantized.fields import Object, field, texts
from multilora_wire.quantized.names import matches_name


@dataclass(frozen=True)
class AdapterRules:
    """allowed: names of modules, in full or their last parts, or `re:` patterns; None for all."""

    allowed: tuple[str, ...] | None = None

    def allow(self, name: str) -> bool:
        """name: in full, such as `model.layers.3.self_attn.q_proj`."""
        last = name.rpartition(".")[2]
        return self.allowed is None or any(pattern == last or matches_name(pattern, name) for pattern in self.allowed)


def read_adapter_rules(places: Iterable[Object]) -> AdapterRules:
    """The rules out of all places where they may stand; a module needs the leave of each. Raises QuantizationError."""
    allowed: tuple[str, ...] | None = None
    for values in places:
        if not field(values, "lora_compatible", bool, True):
            return AdapterRules(())
        if targets := texts(values, "lora_target_modules"):
            allowed = targets if allowed is None else tuple(name for name in allowed if name in targets)
    return AdapterRules(allowed)
