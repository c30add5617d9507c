"""Numbers of hand-made samples, against NumPy and against the definitions."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from multilora_client import Adapter, AdapterTensors
from multilora_client.bench.load import Load, Sample
from multilora_client.bench.plot import plot
from multilora_client.bench.report import (
    Stage,
    describe_knee,
    different_answers,
    find_knee,
    render,
    summarise,
    write_csv,
)
from multilora_client.bench.workload import Job, Target

MakeSample = Callable[..., Sample]


def open_stage(rate: float, samples: Sequence[Sample]) -> Stage:
    return Stage(Load(rate, is_open=True), samples)


def test_percentiles_are_those_of_numpy(make_sample: MakeSample) -> None:
    rng = np.random.default_rng(0)
    first, gaps = rng.exponential(1, 37), rng.exponential(1, (37, 5))
    samples = [make_sample(first_s=a, gaps_s=b, due_s=i) for i, (a, b) in enumerate(zip(first, gaps, strict=True))]
    summary = summarise(samples)
    for percentiles, values in (
        (summary.first_token, first),
        (summary.gap, gaps),
        (summary.latency, first + gaps.sum(axis=1)),
    ):
        measured = (percentiles.p50, percentiles.p90, percentiles.p99)
        assert measured == pytest.approx(np.percentile(values, (50, 90, 99)))


def test_rates_count_answered_requests_from_the_first_due_to_the_last_end(make_sample: MakeSample) -> None:
    samples = [
        make_sample(first_s=1.0, gaps_s=(1.0, 2.0), due_s=10.0),
        make_sample(first_s=1.0, gaps_s=(1.0,), due_s=18.0),
        make_sample(due_s=19.0, error="UNAVAILABLE"),
        make_sample(due_s=19.0, error="UNAVAILABLE"),
        make_sample(due_s=19.0, error="NOT_FOUND"),
    ]
    summary = summarise(samples)
    assert summary.errors == Counter({"UNAVAILABLE": 2, "NOT_FOUND": 1})
    assert (summary.seconds, summary.requests_per_s, summary.tokens_per_s) == (10.0, 0.2, 0.5)


def test_a_load_without_an_answer_has_no_times(make_sample: MakeSample) -> None:
    summary = summarise([make_sample(error="UNAVAILABLE")])
    assert math.isnan(summary.first_token.p50)
    assert summary.tokens_per_s == 0


def test_the_knee_is_the_last_rate_before_first_tokens_take_three_times_as_long(make_sample: MakeSample) -> None:
    def stage(rate: float, first_s: float) -> Stage:
        return open_stage(rate, [make_sample(first_s=first_s)] * 10)

    stages = [stage(4, 0.31), stage(1, 0.1), stage(2, 0.29), stage(8, 0.2)]
    assert find_knee(stages) == 2
    assert (
        describe_knee(stages, 2) == "knee: the server keeps up at 2 requests/s, and no longer at the next higher rate"
    )
    assert find_knee(stages[1:]) is None
    assert describe_knee(stages[1:], None) == "no knee: the server keeps up at 8 requests/s"


def test_a_rate_with_an_error_is_after_the_knee(make_sample: MakeSample) -> None:
    stages = [open_stage(1, [make_sample()]), open_stage(2, [make_sample(), make_sample(error="UNAVAILABLE")])]
    assert find_knee(stages) == 1
    assert find_knee(stages[1:]) == 0
    assert describe_knee(stages[1:], 0) == "no knee: requests fail at the lowest rate"


def test_the_same_weights_have_to_answer_the_same_prompt_alike_whatever_their_task_id(
    make_sample: MakeSample, small_tensors: AdapterTensors
) -> None:
    def ask(task: int, content: str, prompt: str, text: str, error: str = "") -> Sample:
        return make_sample(job=Job(Target(Adapter(task, small_tensors), content), prompt), text=text, error=error)

    right = [
        ask(1, "a", "x", "one"),
        ask(1, "a", "y", "two"),
        ask(2, "b", "x", "three"),
        ask(3, "a", "x", "one"),
        ask(3, "a", "x", "on", error="DEADLINE"),
    ]
    wrong = ask(4, "b", "x", "one")
    assert different_answers(right) == []
    assert different_answers([*right, wrong]) == [(right[2], wrong)]


def test_the_table_has_a_column_a_load_and_errors_by_code(make_sample: MakeSample) -> None:
    text = io.StringIO()
    stages = [
        open_stage(1, [make_sample(first_s=0.1, gaps_s=(0.02, 0.02))]),
        open_stage(2, [make_sample(first_s=0.3), make_sample(error="UNAVAILABLE")]),
    ]
    Console(file=text, width=200).print(render(stages))
    rows = [
        [cell.strip() for cell in line.strip("│┃ \n").replace("┃", "│").split("│")]
        for line in text.getvalue().splitlines()
    ]
    assert ["", "1/s", "2/s"] in rows or ["1/s", "2/s"] in rows
    assert ["errors", "0", "1 UNAVAILABLE"] in rows
    assert ["first token, ms, p50 / p90 / p99", "100 / 100 / 100", "300 / 300 / 300"] in rows
    assert ["between tokens, ms", "20 / 20 / 20", "-"] in rows


def test_the_csv_has_a_line_a_request(tmp_path: Path, make_sample: MakeSample, small_tensors: AdapterTensors) -> None:
    job = Job(Target(Adapter(7, small_tensors), "pirate"), "x")
    samples = [make_sample(due_s=100.0, error="NOT_FOUND"), make_sample(0.1, (0.2, 0.3), due_s=101.5, job=job)]
    write_csv([open_stage(2, samples)], tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open() as file:
        failed, answered = csv.DictReader(file)
    assert (failed["load"], failed["lora_task_id"], failed["error"], failed["first_token_s"]) == (
        "2/s",
        "",
        "NOT_FOUND",
        "",
    )
    assert (answered["lora_task_id"], answered["adapter"], answered["error"]) == ("7", "pirate", "")
    times = [float(answered[name]) for name in ("due_s", "first_token_s", "longest_gap_s", "latency_s")]
    assert times == pytest.approx([1.5, 0.1, 0.3, 0.6])


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_plot_is_drawn(tmp_path: Path, make_sample: MakeSample, num_stages: int) -> None:
    stages = [open_stage(rate, [make_sample(0.1 * rate, (0.1, 0.2))] * 3) for rate in range(1, num_stages + 1)]
    plot(stages, 2.0 if num_stages > 1 else None, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
