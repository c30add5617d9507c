"""transformers with PEFT's adapters in one padded batch: the tokens that all others are held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from benchmarks.peers.exchange import Answer, Case, Job, Recorder, serve
from benchmarks.peft_baseline import load_model

_BASE = "__base__"
"""PEFT's name for the rows of a batch without adapter."""


def start(job: Job) -> Callable[[Case], Answer]:
    torch.set_num_threads(job.num_threads)
    model: Any = load_model(Path(job.model), getattr(torch, job.dtype))
    model.generation_config.eos_token_id = None
    if job.adapters:
        model = PeftModel.from_pretrained(model, job.adapters[0], adapter_name=_name(0))
        for number, directory in enumerate(job.adapters[1:], start=1):
            model.load_adapter(directory, adapter_name=_name(number))
    model.eval()

    @torch.inference_mode()
    def answer(case: Case) -> Answer:
        assert len({len(prompt) for prompt in case.prompts}) == 1, "prompts of one length need no padding"
        recorder = Recorder(len(case.prompts))

        def note(input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            for place, token in enumerate(input_ids[:, -1].tolist()):
                recorder.add(place, [token])
            return torch.zeros(len(input_ids), dtype=torch.bool)

        names = [_BASE if number is None else _name(number) for number in case.adapters]
        model.generate(
            input_ids=torch.tensor(case.prompts),
            attention_mask=torch.ones(len(case.prompts), len(case.prompts[0]), dtype=torch.int64),
            max_new_tokens=case.num_tokens,
            pad_token_id=0,
            do_sample=False,
            stopping_criteria=[note],
            **({"adapter_names": names} if job.adapters else {}),
        )
        return recorder.answer()

    return answer


def _name(number: int) -> str:
    """An adapter's name. Not the number alone: PEFT would take it for the number of a layer."""
    return f"adapter{number}"


if __name__ == "__main__":
    serve(start)
