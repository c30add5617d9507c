"""`multilora bench` as it is run, against a fake Triton on loopback."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from multilora_client import AdapterTensors
from multilora_client.cli import app


def run(fake_triton: Any, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--url", fake_triton.url])


@pytest.fixture
def adapter_dir(tmp_path: Path, small_tensors: AdapterTensors) -> Path:
    small_tensors.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_adapters_are_sent_under_all_task_ids_and_then_asked_by_id_alone(fake_triton: Any, adapter_dir: Path) -> None:
    result = run(fake_triton, "--adapter", adapter_dir, "--num-adapters", 5, "--num-requests", 20, "--concurrency", 3)
    assert result.exit_code == 0, result.output
    uploads, asked = fake_triton.received[:5], fake_triton.received[5:]
    assert {model for model, _ in uploads} == {"generation_unary"}
    assert sorted(int(inputs["lora_task_id"].item()) for _, inputs in uploads) == list(range(1_000_000, 1_000_005))
    assert len(asked) == 20
    assert not any("lora_weights" in inputs for _, inputs in asked)
    assert {inputs["max_tokens"].item() for _, inputs in asked} == {64}
    assert {len(inputs["text_input"][0].split()) for _, inputs in asked} == {128}


def test_adapters_that_are_there_are_asked_in_turn_and_the_table_tells_what_steps_held(
    fake_triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(triton: Any, _: Any) -> Any:
        steps = len(triton.received)
        counts = {"batch_size": (steps, 6 * steps), "batch_adapters": (steps, 5 * steps)}
        requests = {name: {"counts": [steps, 0], "total": total} for name, (steps, total) in counts.items()}
        return answer({"load": {"requests": requests}})

    answer = fake_triton._report
    fake_triton.report = {"load": {}}
    monkeypatch.setattr(type(fake_triton), "_report", report)
    fake_triton.adapters.update(range(40, 46))
    arguments = ["--uploaded", "--num-adapters", 6, "--first-task-id", 40, "--num-requests", 12, "--concurrency", 1]
    result = run(fake_triton, *arguments)
    assert result.exit_code == 0, result.output
    asked = [inputs for model, inputs in fake_triton.received if model != "adapters"]
    assert [int(inputs["lora_task_id"].item()) for inputs in asked] == 2 * list(range(40, 46))
    assert not any("lora_config" in inputs or "lora_weights" in inputs for inputs in asked)
    assert re.search(r"adapters of a step\W+6.0 / 5.0\W", result.stdout)


def test_an_adapter_that_is_not_there_is_told_and_nothing_is_sent(fake_triton: Any) -> None:
    result = run(fake_triton, "--uploaded", "--num-adapters", 1, "--num-requests", 2)
    assert result.exit_code == 1
    assert "[NOT_FOUND] none of 2 requests was answered" in result.stderr
    assert fake_triton.adapters == set()


def test_a_sweep_of_rates_names_the_knee_and_leaves_files(fake_triton: Any, tmp_path: Path) -> None:
    files = ["--csv", tmp_path / "requests.csv", "--plot", tmp_path / "bench.svg"]
    result = run(fake_triton, "--rate", 200, "--rate", 400, "--num-requests", 5, *files)
    assert result.exit_code == 0, result.output
    assert "knee: " in result.stdout
    with (tmp_path / "requests.csv").open() as file:
        assert [row["load"] for row in csv.DictReader(file)] == ["200/s"] * 5 + ["400/s"] * 5
    assert "<svg" in (tmp_path / "bench.svg").read_text()


def test_check_passes_while_answers_stay_the_same(fake_triton: Any) -> None:
    result = run(fake_triton, "--check", "--num-requests", 20)
    assert result.exit_code == 0, result.output
    assert "0 of 20 answers differ" in result.stdout
    assert len({inputs["text_input"][0] for _, inputs in fake_triton.received}) == 4


def test_check_fails_when_an_answer_changes(fake_triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = property(lambda triton: ("Hello",) if len(triton.received) == 8 else ("Ahoy",))
    monkeypatch.setattr(type(fake_triton), "words", words)
    result = run(fake_triton, "--check", "--num-requests", 20, "--concurrency", 1)
    assert result.exit_code == 1
    assert "1 of 20 answers differ" in result.stdout
    assert "answered 'Ahoy', then 'Hello'" in result.stderr


def test_check_fails_when_another_adapter_answers(
    fake_triton: Any, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond = type(fake_triton)._response

    def response(triton: Any, inputs: dict[str, Any], text: str, *, is_final: bool) -> Any:
        is_wrong = "text_input" in inputs and len(triton.received) == 5
        return respond(triton, inputs | {"lora_task_id": np.uint64(7)} if is_wrong else inputs, text, is_final=is_final)

    monkeypatch.setattr(type(fake_triton), "_response", response)
    result = run(fake_triton, "--check", "--adapter", adapter_dir, "--num-requests", 10, "--concurrency", 1)
    assert result.exit_code == 1
    assert "1 requests were answered by another adapter" in result.stderr


def test_a_server_that_answers_nothing_is_a_failure_told_in_its_words(tmp_path: Path) -> None:
    arguments = ["--num-requests", "2", "--url", "grpc://127.0.0.1:9", "--csv", str(tmp_path / "requests.csv")]
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: [UNAVAILABLE] none of 2 requests was answered: no server answers at")
    assert result.stderr.count("\n") == 1
    with (tmp_path / "requests.csv").open() as file:
        assert [row["error"] for row in csv.DictReader(file)] == ["UNAVAILABLE"] * 2


def test_some_requests_that_are_not_answered_are_explained_and_no_number_is_nan(
    fake_triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = "[UNAVAILABLE] the queue is full (request r)"
    monkeypatch.setattr(type(fake_triton), "_error", lambda triton, _: fail if len(triton.received) > 4 else None)
    result = run(fake_triton, "--num-requests", 4, "--concurrency", 1, "--concurrency", 2)
    assert result.exit_code == 0
    assert "4 UNAVAILABLE" in result.stdout
    assert "nan" not in result.stdout
    assert result.stderr == "UNAVAILABLE, such as: the queue is full\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "give one of them"),
        (["--rate", "0"], "--rate must be a number above 0, not 0"),
        (["--rate", "1", "--rate", "nan"], "--rate must be a number above 0, not nan"),
        (["--rate", "inf"], "--rate must be a number above 0, not inf"),
        (["--plot", "bench.doc"], "must end with one of .png, .svg, .pdf"),
        (["--num-adapters", "2"], "name one with --adapter"),
        (["--uploaded"], "--uploaded asks --num-adapters"),
        (["--uploaded", "--num-adapters", "2", "--adapter", "a"], "sends no --adapter"),
    ],
)
def test_contradictions_are_refused(fake_triton: Any, arguments: list[str], message: str) -> None:
    result = run(fake_triton, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert fake_triton.received == []
