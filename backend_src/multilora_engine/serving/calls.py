"""`GenerateCall` and `UploadCall`: the calls of requests to a generation model."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_engine.request import SamplingParams
from multilora_engine.serving.sent_adapter import SentAdapter


@dataclass(frozen=True)
class GenerateCall:
    """One prompt a row, all answered together, each by `num_sequences` answers: drawn, or the best of its beams.

    lora_names: of each row, empty without one; the task id that goes with it is in `lora_task_ids`.
    priorities: of each row, smaller ones first.
    """

    prompts: list[list[int]]
    num_sequences: int
    sampling: list[SamplingParams]
    lora_task_ids: list[int | None]
    lora_names: list[str]
    priorities: list[int]
    adapter: SentAdapter | None
    is_streaming: bool
    excludes_input: bool
    pad_id: int
    returns_perf: bool
    returns_kv_cache: bool
    vocab_size: int

    @property
    def is_search(self) -> bool:
        """Whether beam search answers."""
        return self.sampling[0].beam_width > 1

    @property
    def requests_per_row(self) -> int:
        """How many requests a row is to the engine."""
        return 1 if self.is_search else self.num_sequences


@dataclass(frozen=True)
class UploadCall:
    """Store an adapter and generate nothing."""

    adapter: SentAdapter
    lora_name: str
