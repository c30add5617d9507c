"""transformers + PEFT on the same checkpoint, with the same adapters, as the engine's yardstick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load_model(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The model in a checkpoint directory, or in a GGUF file, whose weights become floats."""
    if checkpoint.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)


class PeftBaseline:
    """A float32 model on the CPU with random adapters on all linear layers, numbered from 0."""

    def __init__(self, checkpoint: Path, num_adapters: int, rank: int) -> None:
        torch.manual_seed(0)
        base = load_model(checkpoint, torch.float32)
        base.generation_config.eos_token_id = None  # every answer has all of its tokens
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
        self._model = PeftModel(base, config, adapter_name=_name(0))
        for number in range(1, num_adapters):
            self._model.add_adapter(_name(number), config)
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(std=0.02)
        self._model.eval()

    def save(self, directory: Path) -> list[Path]:
        """All adapters as PEFT saves them, a directory each."""
        self._model.save_pretrained(str(directory))
        return [directory / name for name in self._model.peft_config]

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
        """Greedy answers to prompts of one length, prompt i with adapter i, and when each of their tokens was there."""
        times: list[float] = []

        def note(input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        output = self._model.generate(
            input_ids=torch.tensor(prompts),
            attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
            adapter_names=[_name(number) for number in range(len(prompts))],
            max_new_tokens=num_tokens,
            pad_token_id=0,
            do_sample=False,
            stopping_criteria=[note],
        )
        return output[:, len(prompts[0]) :].tolist(), times


def _name(number: int) -> str:
    """An adapter's name. Not the number alone: PEFT would take it for the number of a layer."""
    return f"adapter{number}"
