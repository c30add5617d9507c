"""Runs the parts of the GPU's report one after another, and writes what they found after each of them.

A part is a process of its own: one that hangs, crashes or breaks the device costs its own time and nothing else. Needs
nothing but Python here, so that even a machine without torch is told what it lacks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marked_tables import write_table
from multilora_kernels import interpreter
from repository import REPOSITORY

PARTS = {
    "machine": 40,
    "self_test": 80,
    "limits": 40,
    "steps_8b": 110,
    "kernels": 80,
    "overlap": 40,
    "prefill": 60,
    "sampling": 40,
    "quantized": 40,
    "tests": 140,
    "tuning": 70,
    "steps_1b": 50,
    "sanitizer": 60,
}
"""The most seconds of each part, those first that matter most: the last ones get what is left."""

TOTAL_SECONDS = 530
"""Of all parts: a command on a borrowed machine may have ten minutes."""

DRY_PATIENCE = 4
"""A part of a dry run may take so many times as long: the machine may be busy with other work."""

DOCUMENT, TABLE = REPOSITORY / "docs" / "gpu.md", "dry run"
"""Where `--docs` writes the table of a dry run."""

NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "transformers": "transformers",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
    "rich": "rich",
    "typer": "typer",
    "safetensors": "safetensors",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "blake3": "blake3",
    "threadpoolctl": "threadpoolctl",
}
"""The packages that parts, tests and the server import, with the names of their wheels."""


ERROR_UNIT = "of tolerance"
"""Of rows that compare an operator with the reference."""


@dataclass
class PartResult:
    """What a part found. rows: as `gpu.machine.Row`. end: "done", or why it stopped."""

    name: str
    end: str = "not started: no time was left"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def missing_wheels() -> list[str]:
    """The packages that this Python lacks."""
    return [wheel for module, wheel in NEEDED.items() if importlib.util.find_spec(module) is None]


def run_part(name: str, seconds: float, is_dry: bool) -> PartResult:
    """Run one part, for so many seconds at most."""
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        command = [sys.executable, "-m", "gpu.parts", name, str(rows), *(["--dry-run"] if is_dry else [])]
        environment = os.environ | (interpreter.ENVIRONMENT if is_dry else {})
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                end = "done" if process.wait(seconds) == 0 else f"failed: {_last_lines(log)}"
            except subprocess.TimeoutExpired:
                end = f"stopped after {seconds:.0f} s"
                # The part's own processes, such as pytest, are of its group.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = rows.read_text().splitlines() if rows.exists() else []
        return PartResult(name, end, time.monotonic() - started, [json.loads(line) for line in lines])


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-6:])


def write_report(results: Mapping[str, PartResult], wheels: list[str], output: Path) -> None:
    """`gpu_report.json` and `gpu_report.md` in a folder."""
    output.mkdir(parents=True, exist_ok=True)
    content = {"missing_wheels": wheels, "parts": [vars(result) for result in results.values()]}
    (output / "gpu_report.json").write_text(json.dumps(content, indent=1) + "\n")
    (output / "gpu_report.md").write_text(render(results, wheels))


def render(results: Mapping[str, PartResult], wheels: list[str]) -> str:
    """The report as Markdown."""
    lines = ["# GPU report", "", f"Missing wheels: {', '.join(wheels) or 'none'}.", ""]
    for result in results.values():
        lines += [f"## {result.name}: {result.end} ({result.seconds:.0f} s)", ""]
        if result.rows:
            lines += ["| what | value | unit | of limit | note |", "| --- | ---: | --- | ---: | --- |"]
            lines += [_line(row) for row in result.rows]
            lines.append("")
    return "\n".join(lines)


def docs_table(results: Mapping[str, PartResult]) -> str:
    """What each part of a dry run came to. Its times are those of an interpreter, and say nothing of a GPU."""
    lines = ["| part | end | seconds | figures | comparisons with the reference |", "| --- | --- | ---: | ---: | --- |"]
    for result in results.values():
        errors = [row["value"] for row in result.rows if row["unit"] == ERROR_UNIT]
        compared = f"{len(errors)}, the largest error {max(errors):.2g} of the tolerance" if errors else ""
        num_figures = len(result.rows) - len(errors)
        end = result.end.replace("|", "/")
        lines.append(f"| {result.name} | {end} | {result.seconds:.0f} | {num_figures or ''} | {compared} |")
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    value = "" if row["value"] is None else f"{row['value']:,.4g}"
    share = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
    note = str(row["note"]).replace("|", "/").replace("\n", " ")
    return f"| {row['what']} | {value} | {row['unit']} | {share} | {note} |"


def report(parts: list[str], output: Path, total_seconds: float, is_dry: bool) -> dict[str, PartResult]:
    """Run the parts within so many seconds."""
    end = time.monotonic() + total_seconds
    results, wheels = {name: PartResult(name) for name in parts}, missing_wheels()
    print(f"missing wheels: {', '.join(wheels) or 'none'}", flush=True)
    for name in parts:
        seconds = min(PARTS[name] * (DRY_PATIENCE if is_dry else 1), end - time.monotonic())
        if seconds > 0:
            results[name] = run_part(name, seconds, is_dry)
        print(render({name: results[name]}, wheels).split("\n\n", 2)[2], flush=True)
        write_report(results, wheels, output)
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check our kernels on this machine's GPU, and measure them.")
    parser.add_argument("--output", type=Path, default=Path("gpu_report_results"), help="folder of the report")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="the most of all parts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which, in this order")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, without a GPU")
    parser.add_argument("--docs", action="store_true", help="write the table of a dry run into docs/gpu.md")
    asked = parser.parse_args()
    if asked.docs and not asked.dry_run:
        parser.error("--docs takes --dry-run: a report of a GPU is a page of its own")
    return asked


if __name__ == "__main__":
    asked = _arguments()
    found = report(asked.parts, asked.output, asked.seconds, asked.dry_run)
    if asked.docs:
        write_table(DOCUMENT, TABLE, docs_table(found))
    sys.exit(any(result.end != "done" for result in found.values()))
