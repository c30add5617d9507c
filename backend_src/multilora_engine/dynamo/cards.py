"""`AdapterCards`: tells the fleet of the adapters that a worker answers for."""

from __future__ import annotations

from typing import Any

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model, unregister_model

from multilora_engine.dynamo.card import AdapterCard


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
