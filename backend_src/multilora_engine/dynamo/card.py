"""`AdapterCard`: the facts that the fleet is told of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from multilora_wire.adapter_info import AdapterInfo


@dataclass(frozen=True)
class AdapterCard:
    """The card of an adapter. digest, ranks, modules: empty before its weights have been read."""

    name: str
    digest: str = ""
    ranks: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def lora_id(self) -> int:
        """The number by which Dynamo knows the name, the same on every worker: its `lora_name_to_id`."""
        return int.from_bytes(blake3(self.name.encode()).digest()[4:8], "big") & 0x7FFF_FFFF

    @property
    def user_data(self) -> Mapping[str, Any]:
        """Additions to Dynamo's own workers' cards: which version it was when the card was published, and how large.

        Dynamo lets nobody change a card, and to take it away for a moment would refuse requests: one that moves to
        other weights keeps its card, and `list_loras` tells which ones it has.
        """
        return {
            "lora_adapter": True,
            "lora_id": self.lora_id,
            "digest": self.digest,
            "rank": max(self.ranks, default=0),
            "modules": list(self.modules),
        }


def card_of(info: AdapterInfo, module_names: Mapping[int, str]) -> AdapterCard:
    """The card of an adapter that has been read. module_names: of the wire modules of the model, by their ids."""
    modules = tuple(module_names[module_id] for module_id in info.module_ids)
    return AdapterCard(info.name, info.digest, info.ranks, modules)
