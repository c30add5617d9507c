"""Which modules of a quantised checkpoint adapters may change, as its author says.

`lora_compatible` and `lora_target_modules` stand in config.json, in its `quantization_config`, or in lora_metadata.json
beside it. No version of compressed-tensors has written them; checkpoints of a proposal to llm-compressor (pull request
2037) have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multilora_wire.quantized.fields import Object, field, texts
from multilora_wire.quantized.names import check_pattern, matches_name


@dataclass(frozen=True)
class AdapterRules:
    """allowed: a list from each place that has one, of modules by their names in full, by last parts of these, or by
    `re:` patterns. A module needs to be in every list.
    """

    allowed: tuple[tuple[str, ...], ...] = ()

    def allow(self, *names: str) -> bool:
        """Whether adapters may change a module. names: in full, such as `model.layers.3.self_attn.q_proj`; several
        where checkpoints store it as a part of another.
        """
        return all(any(_matches(pattern, name) for pattern in patterns for name in names) for patterns in self.allowed)


def read_adapter_rules(values: Object) -> AdapterRules:
    """The rules in one place. Raises QuantizationError."""
    if not field(values, "lora_compatible", bool, True):
        return AdapterRules(((),))
    targets = texts(values, "lora_target_modules")
    for target in targets:
        check_pattern("lora_target_modules", target)
    return AdapterRules((targets,) if targets else ())


def together(rules: Iterable[AdapterRules]) -> AdapterRules:
    """The rules of several places."""
    return AdapterRules(tuple(patterns for one in rules for patterns in one.allowed))


def _matches(pattern: str, name: str) -> bool:
    return name.endswith(f".{pattern}") or matches_name(pattern, name)
