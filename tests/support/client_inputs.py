"""The files that client programs read, and the answers of transformers and PEFT, which some of them compare."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.sample_adapters import ADAPTERS_DIRECTORY

PROMPT = "The capital of France is"
QUESTIONS = ("What do bees make?", "Which sea is salty?", "Who are you?", "What is the capital of France?")
NUM_TOKENS = 16
ADAPTER = "pirate"


def write_inputs(directory: Path, model: Path) -> dict[str, str]:
    """The inputs that argv may name beside the server's places: prompt; two_prompts, answers and whole_answers, which
    are JSON lists; the answers are of the prompt, greedy, by transformers, whole answers start with it.

    `directory` gets the files

    dataset.json: a list of {input, instruction, output}, as TensorRT-LLM's benchmarks read.
    prompt.csv: the tokens of the prompt. base.csv, pirate.csv: the prompt and its greedy answer, of the base model by
        transformers, and with the adapter by PEFT.
    """
    task = {"instruction": "Answer in few words.", "output": "Some words of an answer"}
    (directory / "dataset.json").write_text(json.dumps([{"input": question, **task} for question in QUESTIONS]))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt: list[int] = tokenizer.encode(PROMPT)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answer = _greedy(base, prompt)
    adapted = _greedy(PeftModel.from_pretrained(base, str(ADAPTERS_DIRECTORY / ADAPTER)), prompt)
    for name, tokens in (("prompt", prompt), ("base", prompt + answer), (ADAPTER, prompt + adapted)):
        _write_csv(directory / f"{name}.csv", tokens)
    text = str(tokenizer.decode(answer))
    return {
        "prompt": PROMPT,
        "two_prompts": json.dumps([PROMPT, QUESTIONS[0]]),
        "answers": json.dumps([text]),
        "whole_answers": json.dumps([PROMPT + text]),
    }


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """The tokens of the answer."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


def _write_csv(path: Path, tokens: Sequence[int]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(tokens)
