"""Streams in every script, cut into tokens anywhere, are what transformers decodes, through both doors."""

from __future__ import annotations

from pathlib import Path

from multilora_engine.tritonserver import ServerProcess
from trials.check_streamed_text import SAMPLES, check_all, questions


def test_streamed_text_is_what_transformers_decodes(server: ServerProcess, default_model_dir: Path) -> None:
    asked = questions(len(SAMPLES), seed=1)
    assert {question.script for question in asked} == set(SAMPLES)
    assert check_all(server.grpc_url, default_model_dir, asked, on_done=lambda: None) == []
