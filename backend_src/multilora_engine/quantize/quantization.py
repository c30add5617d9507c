"""All of `multilora quantize`: check, measure, calibrate, write, measure again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from multilora_engine.models.checkpoint import checkpoint_files
from multilora_engine.models.model_config import EMBEDDINGS
from multilora_engine.quantize.calibration import round_calibrated
from multilora_engine.quantize.checkpoint import check_output, dequantized_weights, write_checkpoint
from multilora_engine.quantize.measure import load_float_model, perplexity, replace_weights
from multilora_engine.quantize.plan import OuterOptions, make_plan
from multilora_engine.quantize.schemes import Scheme
from multilora_engine.quantize.text import count_tokens, token_windows
from multilora_engine.working_directory import working_directory

OnProgress = Callable[[str, int, int], None]
"""Called with a stage's name, the number of its finished parts, and the number of all its parts."""


@dataclass(frozen=True)
class Report:
    """The result of `multilora quantize`.

    scheme: in words. num_modules: the linears and embeddings that became codes. bytes_*: the size of the files of
    weights. *_seconds: wall time.
    perplexity_before: with the float weights, over num_text_tokens. perplexity_after: with the weights that
    compressed-tensors makes of the codes. None if no text was given. num_calibration_tokens: 0 without calibration.
    """

    scheme: str
    num_modules: int
    bytes_before: int
    bytes_after: int
    perplexity_before: float | None
    perplexity_after: float | None
    num_text_tokens: int
    num_calibration_tokens: int
    calibration_seconds: float
    rounding_seconds: float


def quantize_checkpoint(
    source: Path,
    output: Path,
    scheme: Scheme,
    *,
    calibration: Path | None,
    text: Path | None,
    outer: OuterOptions,
    device: torch.device,
    on_progress: OnProgress,
) -> Report:
    """Round the checkpoint in the directory `source` by `scheme`, and write it to the directory `output`.

    calibration: a text. Linears are rounded so that their outputs on this text change least.
    text: a text on which perplexity is measured. Calibration and perplexity load the whole model. Rounding alone loads
        one file of the checkpoint at a time.
    outer: how head and embeddings are stored. If either becomes codes, a tied head becomes a tensor of its own.

    Raises ConfigError before anything is written, also if another process is writing `output`. Raises OSError if
    writing fails, and leaves no `output` then.
    """
    check_output(output)
    plan = make_plan(source, scheme, outer)
    calibration_windows = token_windows(source, calibration) if calibration else []
    text_windows = token_windows(source, text) if text else []

    with working_directory(output) as directory:
        calibrated: Mapping[str, Mapping[str, torch.Tensor]] = {}
        before, calibration_seconds = None, 0.0
        if calibration_windows or text_windows:
            model = load_float_model(source, device)
            if text_windows:
                before = perplexity(model, text_windows, partial(on_progress, "perplexity before"))
            if calibration_windows:
                start = time.perf_counter()
                linears = {name: scheme for name, scheme in plan.schemes.items() if name != EMBEDDINGS}
                on_calibrated = partial(on_progress, "calibrating")
                calibrated = round_calibrated(model, linears, calibration_windows, on_calibrated)
                calibration_seconds = time.perf_counter() - start
            del model  # It must not share the memory with the rounding.

        start = time.perf_counter()
        write_checkpoint(plan, directory, calibrated, device, partial(on_progress, "rounding"))
        rounding_seconds = time.perf_counter() - start
        directory.rename(output)

    return Report(
        scheme=plan.linears.describe(),
        num_modules=len(plan.schemes),
        bytes_before=_weight_bytes(source),
        bytes_after=_weight_bytes(output),
        perplexity_before=before,
        perplexity_after=_perplexity_after(source, output, text_windows, device, on_progress) if text_windows else None,
        num_text_tokens=count_tokens(text_windows),
        num_calibration_tokens=count_tokens(calibration_windows),
        calibration_seconds=calibration_seconds,
        rounding_seconds=rounding_seconds,
    )


def _perplexity_after(
    source: Path, output: Path, windows: list[torch.Tensor], device: torch.device, on_progress: OnProgress
) -> float:
    model = load_float_model(source, device)
    replace_weights(model, dequantized_weights(output))
    return perplexity(model, windows, partial(on_progress, "perplexity after"))


def _weight_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint_files(checkpoint))
