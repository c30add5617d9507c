"""Runs the parts of the GPU's report one after another, and writes what they found after each of them.

A part is a process of its own: one that hangs, crashes or breaks the device costs its own time and nothing else. Needs
nothing but Python here, so that even a machine without torch is told what it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repository import REPOSITORY

PARTS = {
    "machine": 40,
    "limits": 40,
    "quantized": 40,
    "experts": 60,
    "sampling": 40,
    "kernels": 60,
    "attention": 40,
    "kernels_of_a_step": 75,
    "self_test": 80,
    "steps_8b": 110,
    "steps_w4a16": 60,
    "overlap": 40,
    "prefill": 60,
    "tests": 140,
    "candidates": 90,
    "tuning": 110,
    "steps_1b": 50,
    "sanitizer": 200,
}
"""The most seconds of each part. First come those that do without the kernels of the CPU, which are compiled meanwhile,
then those that matter most: the last ones get what is left."""

SHARED_PARTS = ("self_test", "candidates")
"""Parts that wait for the compiler: so many processes share them as there are processors, up to `MOST_PROCESSES`."""

MOST_PROCESSES = 12

TOTAL_SECONDS = 530
"""Of all parts: who borrows a GPU may have it for ten minutes."""

DRY_PATIENCE = 4
"""A part of a dry run may take so many times as long: the machine may be busy with other work."""

WITH_ENGINE = ("kernels_of_a_step", "steps_8b", "steps_w4a16", "overlap", "prefill", "steps_1b", "tests")
WITH_CPU_KERNELS = ("self_test", *WITH_ENGINE, "sanitizer")
"""Parts that compute angles of rotations, or more, on the CPU: each waits until its kernels are compiled."""

CPU_KERNELS_LOG = "cpu_kernels.log"

_PYDANTIC = ("pydantic_core", "annotated_types", "typing_inspection")
"""Of pydantic's own needs: wheels that are carried to a machine bring none along."""

NEEDED = {
    **dict.fromkeys(("torch", "triton", "numpy"), tuple(PARTS)),
    "msgspec": WITH_ENGINE,
    **dict.fromkeys(
        (
            *("pytest", "xdist", "hypothesis", "pydantic", "blake3", "llguidance", "safetensors"),
            *("tokenizers", "transformers", "huggingface_hub"),
            *_PYDANTIC,
        ),
        ("tests",),
    ),
}
"""The packages that parts import, and which parts do."""

WHEELS = {
    "xdist": "pytest-xdist",
    "huggingface_hub": "huggingface-hub",
    **{module: module.replace("_", "-") for module in _PYDANTIC},
}
"""Of packages with other names."""

TILES = REPOSITORY / "kernels" / "multilora_kernels" / "cuda" / "block_sizes.json"

_MARK = "MULTILORA_REPORT_PART"
"""The environment variable of all processes of a part, by whatever program they were started."""

LOGS = "logs"
"""In a report's folder, the folder of what its parts print: whole tracebacks, of which a row has a line."""

ERROR_UNIT, PLAN = "of tolerance", "plan"
"""Unit of rows that compare an operator with the reference; name of rows whose notes are entries of `TILES`."""


@dataclass
class PartResult:
    """What a part found. rows: as `gpu.machine.Row`. end: "done", or why it stopped."""

    name: str
    end: str = "not started: no time was left"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def missing_wheels() -> dict[str, tuple[str, ...]]:
    """The packages that this Python lacks, and the parts that fail for it."""
    absent = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    return {WHEELS.get(module, module): NEEDED[module] for module in absent}


def missing_tools() -> list[str]:
    """What this machine lacks of all that Triton compiles its launchers with, and we the CPU's kernels."""
    # As Triton does: Debian's own scheme has another folder than its Python.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    missing = [] if has_compiler else ["a C compiler (gcc, clang, or CC)"]
    missing += [] if header.exists() else [f"{header} (python3-dev)"]
    return missing + ([] if os.environ.get("CXX") or shutil.which("c++") else ["a C++ compiler (c++, or CXX)"])


def run_part(name: str, seconds: float, is_dry: bool, log: Path) -> PartResult:
    """Run one part, for so many seconds at most. log: the file of all that its processes print."""
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0))) if name in SHARED_PARTS and not is_dry else 1
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        commands = [part_command(sys.executable, name, rows, is_dry, n, count) for n in range(count)]
        return run_processes(name, commands, part_environment(is_dry), seconds, log, rows)


def part_command(
    python: str, name: str, rows: Path, is_dry: bool, process: int = 0, num_processes: int = 1
) -> list[str]:
    """The command of one process of a part, which appends its rows to a file."""
    arguments = [name, str(rows), str(process), str(num_processes), *(["--dry-run"] if is_dry else [])]
    return [python, "-m", "gpu.parts", *arguments]


def part_environment(is_dry: bool) -> dict[str, str]:
    if not is_dry:
        return dict(os.environ)
    from multilora_kernels import interpreter

    return os.environ | interpreter.ENVIRONMENT


def run_processes(
    name: str, commands: list[list[str]], environment: Mapping[str, str], seconds: float, log: Path, rows: Path
) -> PartResult:
    """Run the processes of a part, for so many seconds at most, and read the rows that they have appended to a file.

    Whatever they have started ends with them: an engine has a session of its own, and one that loads or hangs does not
    notice that it is alone.
    """
    started, mark = time.monotonic(), f"{_MARK}={secrets.token_hex(16)}"
    environment = {**environment, **dict([mark.split("=")])}
    with log.open("w") as output:
        processes = [
            subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            for command in commands
        ]
        end = _end_of(processes, seconds)
    for _ in range(2):  # A process that starts another one at this moment is dead the second time.
        _kill_marked(mark)
    if end == "failed":
        end = f"failed: {_last_lines(log)}"
    lines = rows.read_text().splitlines() if rows.exists() else []
    return PartResult(name, end, time.monotonic() - started, [json.loads(line) for line in lines])


def _end_of(processes: list[subprocess.Popen[bytes]], seconds: float) -> str:
    """How the processes of a part end, within so many seconds."""
    deadline = time.monotonic() + seconds
    try:
        statuses = [process.wait(max(0, deadline - time.monotonic())) for process in processes]
        return "failed" if any(statuses) else "done"
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        for process in processes:
            if process.poll() is None:
                # A part's own processes, such as pytest, are of its group.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _kill_marked(mark: str) -> None:
    """SIGKILL every process with this variable in its environment."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-6:])


def write_report(results: Mapping[str, PartResult], missing: str, output: Path) -> None:
    """`gpu_report.json`, `gpu_report.md`, and what was tuned as a new `block_sizes.json`, in a folder."""
    write_results(results, missing, output / "gpu_report")
    entries = [json.loads(row["note"]) for result in results.values() for row in result.rows if row["what"] == PLAN]
    if entries:
        (output / TILES.name).write_text(json.dumps(tuned_tiles(entries), indent=2) + "\n")


def write_results(results: Mapping[str, PartResult], missing: str, place: Path) -> None:
    """The results as JSON and as Markdown, in two files of one name. missing: a sentence above all results."""
    content = {"missing": missing, "parts": [vars(result) for result in results.values()]}
    place.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    place.with_suffix(".md").write_text(render(results, missing))


def tuned_tiles(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of tile sizes with these entries in it: {"sm_90": {"update": {"decode": ...}}} each."""
    table: dict[str, Any] = json.loads(TILES.read_text())
    for entry in entries:
        for gpu, operators in entry.items():
            for operator, regimes in operators.items():
                table.setdefault(gpu, {}).setdefault(operator, {}).update(regimes)
    return table


def render(results: Mapping[str, PartResult], missing: str) -> str:
    """The report as Markdown."""
    lines = ["# GPU report", "", f"{missing}.", ""]
    for result in results.values():
        lines += [f"## {result.name}: {result.end} ({result.seconds:.0f} s)", ""]
        if result.rows:
            lines += ["| what | value | unit | of limit | note |", "| --- | ---: | --- | ---: | --- |"]
            lines += [_line(row) for row in result.rows]
            lines.append("")
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    value = "" if row["value"] is None else f"{row['value']:,.4g}"
    share = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
    note = str(row["note"]).replace("|", "/").replace("\n", " ")
    return f"| {row['what']} | {value} | {row['unit']} | {share} | {note} |"


def report(parts: list[str], output: Path, total_seconds: float, is_dry: bool) -> dict[str, PartResult]:
    """Run the parts within so many seconds."""
    end = time.monotonic() + total_seconds
    results, missing = {name: PartResult(name) for name in parts}, describe_missing()
    print(missing, flush=True)
    # At once: a folder that cannot be written is to be known before the first part has taken its time.
    logs = output / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    write_report(results, missing, output)
    with _cpu_kernels_ahead(logs / CPU_KERNELS_LOG) if not is_dry else contextlib.nullcontext() as kernels:
        for name in parts:
            waited = _end_of([kernels], end - time.monotonic()) if kernels and name in WITH_CPU_KERNELS else "done"
            seconds = min(PARTS[name] * (DRY_PATIENCE if is_dry else 1), end - time.monotonic())
            if "machine" in results and results["machine"].end.startswith("failed"):
                results[name].end = "not started: the part machine failed"
            elif waited == "failed":
                results[name].end = f"not started: the CPU's kernels do not compile, see {LOGS}/{CPU_KERNELS_LOG}"
            elif seconds > 0:
                results[name] = run_part(name, seconds, is_dry, logs / f"{name}.log")
            print(render({name: results[name]}, missing).split("\n\n", 2)[2], flush=True)
            write_report(results, missing, output)
    return results


@contextlib.contextmanager
def _cpu_kernels_ahead(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Compile the CPU's kernels while parts run that do without them. Gives the process that does; log: its output."""
    command = [sys.executable, "-m", "multilora_kernels.cpu"]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        yield process
        _end_of([process], seconds=0)


def describe_missing() -> str:
    wheels = [f"{wheel} (parts: {', '.join(parts)})" for wheel, parts in missing_wheels().items()]
    return f"Missing wheels: {'; '.join(wheels) or 'none'}. Missing tools: {', '.join(missing_tools()) or 'none'}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check our kernels on this machine's GPU, and measure them.")
    parser.add_argument("--output", type=Path, default=Path("gpu_report_results"), help="folder of the report")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="the most of all parts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which, in this order")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    asked = _arguments()
    found = report(asked.parts, asked.output, asked.seconds, asked.dry_run)
    sys.exit(any(result.end != "done" for result in found.values()))
