"""The engine in the process that measures it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tokenizers import Tokenizer

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.request import GenerationRequest, SamplingParams


class EngineInProcess:
    """The engine as the server configures it, without anything around it. parameters: as of `generation`."""

    def __init__(self, model: Path, parameters: Mapping[str, str] = MappingProxyType({})) -> None:
        self._engine = Engine(EngineConfig.from_parameters({"model_path": str(model), **parameters}))
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._request_ids = itertools.count()

    def close(self) -> None:
        self._engine.close()

    def put(self, lora_task_id: int, adapter: PackedAdapter) -> None:
        self._engine.put_adapter(lora_task_id, adapter)

    def tokens_per_s(
        self, prompts: Sequence[str], output_tokens: int, lora_task_ids: Sequence[int | None] = ()
    ) -> float:
        """The tokens/s of all prompts at once, until the last answer is whole. lora_task_ids: empty for none at all."""
        started, num_tokens = time.perf_counter(), 0
        for prompt, lora_task_id in zip(prompts, lora_task_ids or [None] * len(prompts), strict=True):
            sampling = SamplingParams(max_tokens=output_tokens, end_id=-1)
            token_ids = self._tokenizer.encode(prompt).ids
            request_id = f"bench-{next(self._request_ids)}"
            self._engine.add_request(GenerationRequest(request_id, token_ids, sampling, lora_task_id))
        while self._engine.has_work:
            num_tokens += sum(len(output.token_ids) for output in self._engine.step())
        return num_tokens / (time.perf_counter() - started)
