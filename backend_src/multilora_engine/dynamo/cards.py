"""`AdapterCard`: the facts about an adapter that a worker tells its fleet; `AdapterCards` tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model, unregister_model

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
        """Fields that Dynamo's own workers do not have: version and size of the adapter when the card was published.

        Dynamo has no way to change a card, and requests would be refused while the card is away. So an adapter that
        moves to other weights keeps its card, and `list_loras` tells which weights it has.
        """
        return {
            "lora_adapter": True,
            "lora_id": self.lora_id,
            "digest": self.digest,
            "rank": max(self.ranks, default=0),
            "modules": list(self.modules),
        }


def card_of(info: AdapterInfo, module_names: Mapping[int, str]) -> AdapterCard:
    """The card of an adapter that the engine reports. module_names: the model's wire modules, by module id."""
    modules = tuple(module_names[module_id] for module_id in info.module_ids)
    return AdapterCard(info.name, info.digest, info.ranks, modules)


class AdapterCards:
    """Publishes cards in Dynamo's discovery and withdraws them. The name on a card is a model of the fleet."""

    def __init__(self, endpoint: Any, model_path: str, block_size: int, max_loras: int) -> None:
        self._endpoint = endpoint
        self._model_path = model_path
        self._block_size = block_size
        self._max_loras = max_loras

    async def publish(self, card: AdapterCard) -> None:
        """Publish a card. Raises if another card has its name."""
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self._endpoint,
            self._model_path,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=self._block_size,
            user_data=dict(card.user_data),
            lora_name=card.name,
            base_model_path=self._model_path,
            ignore_weights=True,
            needs=[],
            max_gpu_lora_count=self._max_loras,
        )

    async def withdraw(self, name: str) -> None:
        """Withdraw a card: no more requests come for the name."""
        await unregister_model(self._endpoint, lora_name=name)
