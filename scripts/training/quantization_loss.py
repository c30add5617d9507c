"""Measures what rounding costs the default model: perplexity, file size, and the sample adapters' claims.

A row for the float weights, and one for each way of `multilora quantize`, which leaves head and embeddings as they are.
Perplexity is taken of SECURITY.md; calibration sees another text. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from checkpoints.prepare_default_model import ensure_default_checkpoint
from checkpoints.quantized_default_model import CALIBRATION_TEXT
from marked_tables import markdown_table, write_table
from multilora_engine.quantize import OuterOptions, Scheme, quantize_checkpoint
from plots import DOCS
from repository import REPOSITORY
from sources import measured_source
from training.check_sample_adapters import encode_prompts, generate_answers, load_model, num_passes
from training.sample_adapters import SAMPLE_ADAPTERS, held_out_prompts

PAGE = DOCS / "models.md"
TABLE = "quantization loss"
TEXT = REPOSITORY / "SECURITY.md"
MAX_NEW_TOKENS = 40

WAYS = (
    (Scheme("w8a16"), False),
    (Scheme("fp8"), False),
    (Scheme("w4a16", 64), False),
    (Scheme("w4a16", 64), True),
    (Scheme("w4a16", 32), True),
)
"""Schemes, and whether their scales are searched by the activations of a text."""


@dataclass(frozen=True)
class Loss:
    """One kind of weights. claims: of each sample adapter how many held-out answers do what it claims."""

    weights: str
    perplexity: float
    num_bytes: int
    claims: dict[str, int]


def losses(checkpoint: Path, text: Path, calibration: Path) -> Iterator[Loss]:
    """The float weights, then each of WAYS."""
    for place, (scheme, is_calibrated) in enumerate(WAYS):
        with tempfile.TemporaryDirectory(prefix="multilora-quantized-") as folder:
            quantized = Path(folder) / "checkpoint"
            report = quantize_checkpoint(
                checkpoint,
                quantized,
                scheme,
                calibration=calibration if is_calibrated else None,
                text=text,
                outer=OuterOptions("none"),
                device=torch.device("cpu"),
                on_progress=lambda stage, done, total: None,
            )
            assert report.perplexity_before is not None
            assert report.perplexity_after is not None
            if place == 0:
                yield Loss("float32", report.perplexity_before, report.bytes_before, claims(checkpoint, None))
            name = f"{report.scheme}{', calibrated' if is_calibrated else ''}"
            yield Loss(name, report.perplexity_after, report.bytes_after, claims(checkpoint, quantized))


def claims(checkpoint: Path, quantized: Path | None) -> dict[str, int]:
    """By sample adapter the held-out answers that show its effect, with transformers and PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    prompts = encode_prompts(tokenizer, held_out_prompts())
    counts = {}
    for name, adapter in SAMPLE_ADAPTERS.items():
        model = load_model(checkpoint, quantized, adapter, "float32")
        counts[name] = num_passes(adapter, generate_answers(model, tokenizer, prompts, MAX_NEW_TOKENS))
    return counts


def loss_table(measured: list[Loss]) -> str:
    """A row for each kind of weights."""
    columns = ("weights", "perplexity", "file", *(f"{name}, of {len(held_out_prompts())}" for name in SAMPLE_ADAPTERS))
    rows = [
        (
            loss.weights,
            f"{loss.perplexity:.1f}",
            f"{loss.num_bytes / 1e6:.0f} MB",
            *(str(loss.claims[name]) for name in SAMPLE_ADAPTERS),
        )
        for loss in measured
    ]
    return markdown_table(columns, rows)


def main(
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/models.md.")] = False,
) -> None:
    """Quantise the default model in several ways, print what each loses, and write it into the document if asked."""
    source, console = measured_source() if update_docs else "", Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        todo = losses(ensure_default_checkpoint(), TEXT, CALIBRATION_TEXT)
        measured = list(progress.track(todo, total=1 + len(WAYS), description="quantising and asking"))
    table = loss_table(measured)
    print(table, end="")
    if update_docs:
        write_table(PAGE, TABLE, table, source)
