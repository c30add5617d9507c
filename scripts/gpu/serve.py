"""Serves from a GPU, step by step: packages, kernels, right answers, speed, recovery, the kernels of a step.

Each step is a process of its own with a time limit, a log and a file of rows, which has each row as soon as it is
known; after each step `gpu_serve.json` and `gpu_serve.md` have all rows so far. A step that fails or is stopped costs
its own time and nothing else. Needs nothing but Python here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from gpu.report import (
    DRY_PATIENCE,
    LOGS,
    PartResult,
    part_command,
    part_environment,
    render,
    run_processes,
    write_results,
)
from gpu.serve_packages import KERNELS, SOURCES, TRITONSERVER, python_of
from repository import REPOSITORY

PACKAGES, KERNELS_OF_A_STEP = "packages", "kernels_of_a_step"

STEPS = {PACKAGES: 40, "prepare": 100, "answers": 80, "speed": 165, "recovery": 60, KERNELS_OF_A_STEP: 90}
"""The most seconds of each step. The first and the last have programs of their own."""

TOTAL_SECONDS = 470
"""Of all steps: with what comes before and after, eight minutes."""

NAME = "gpu_serve"


def serve(
    output: Path, work: Path, bundle: Path | None, is_dry: bool, steps: list[str], wants_tritonserver: bool = True
) -> dict[str, PartResult]:
    """Run the steps. output: the folder of what they found. work: the folder that one step leaves to the next."""
    end = time.monotonic() + TOTAL_SECONDS * (DRY_PATIENCE if is_dry else 1)
    results, about = {name: PartResult(name) for name in steps}, f"Bundle: {bundle.name if bundle else 'none'}"
    logs = output / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    write_results(results, about, output / NAME)
    for name in steps:
        seconds = min(STEPS[name] * (DRY_PATIENCE if is_dry else 1), end - time.monotonic())
        rows = output / f"{name}.jsonl"
        rows.unlink(missing_ok=True)
        if seconds > 0:
            has_tritonserver = wants_tritonserver and any(
                row["what"] == TRITONSERVER and row["value"] is not None
                for result in results.values()
                for row in result.rows
            )
            command = _command(name, rows, work, bundle, is_dry, has_tritonserver)
            environment = _environment(name, work, is_dry)
            results[name] = run_processes(name, [command], environment, seconds, logs / f"{name}.log", rows)
        print(render({name: results[name]}, about).split("\n\n", 2)[2], flush=True)
        write_results(results, about, output / NAME)
    return results


def _command(name: str, rows: Path, work: Path, bundle: Path | None, is_dry: bool, has_tritonserver: bool) -> list[str]:
    if name == PACKAGES:
        return [sys.executable, "-m", "gpu.serve_packages", str(rows), str(work), *([str(bundle)] if bundle else [])]
    python = str(python_of(work)) if python_of(work).exists() else sys.executable
    if name == KERNELS_OF_A_STEP:
        return part_command(python, name, rows, is_dry)
    options = [*(["--dry-run"] if is_dry else []), *([] if has_tritonserver else ["--no-tritonserver"])]
    return [python, "-m", "gpu.serve_steps", name, str(rows), str(work), *options]


def _environment(name: str, work: Path, is_dry: bool) -> dict[str, str]:
    """All steps share a cache of kernels, which is empty at first."""
    environment = part_environment(is_dry) if name == KERNELS_OF_A_STEP else dict(os.environ)
    sources = (str(REPOSITORY / source) for source in SOURCES)
    environment["PYTHONPATH"] = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment["TRITON_CACHE_DIR"] = str(work / "kernels")
    if (work / KERNELS).exists():
        environment["MULTILORA_KERNELS_CACHE"] = str(work / KERNELS)
    return environment


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve from this machine's GPU, and check and measure that.")
    parser.add_argument("--output", type=Path, default=Path("gpu_serve_results"), help="folder of what was found")
    parser.add_argument("--bundle", type=Path, help="archive of scripts/gpu_bundle; without it, packages that are here")
    parser.add_argument("--work", type=Path, help="folder for 20 GiB of checkpoints and kernels; default: a new one")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="which, in this order")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--no-tritonserver", action="store_true", help="ask the engine's own process in its place")
    return parser.parse_args()


if __name__ == "__main__":
    asked = _arguments()
    with ExitStack() as stack:
        work = asked.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{NAME}-")))
        bundle = asked.bundle and asked.bundle.absolute()
        found = serve(
            asked.output.absolute(), work.absolute(), bundle, asked.dry_run, asked.steps, not asked.no_tritonserver
        )
    sys.exit(any(result.end != "done" for result in found.values()))
