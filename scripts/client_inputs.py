"""The files that client programs read."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = ("What do bees make?", "Which sea is salty?", "Who are you?", "What is the capital of France?")


def write_inputs(directory: Path) -> None:
    """Write into `directory`:

    dataset.json: a list of {input, instruction, output}, as TensorRT-LLM's benchmarks read.
    """
    rows = [
        {"input": question, "instruction": "Answer in few words.", "output": "Some words"} for question in QUESTIONS
    ]
    (directory / "dataset.json").write_text(json.dumps(rows))
