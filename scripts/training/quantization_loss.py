"""Measures what rounding costs the default model: perplexity, file size, and the sample adapters' claims.

Rows for the float weights, for bfloat16, for ways of `multilora quantize`, which leaves head and embeddings as they
are, and for the types of codes in which a server stores adapters. Perplexity is taken of SECURITY.md, by transformers;
calibration sees another text. The engine gives the answers that are counted. Takes about ten minutes on two cores.
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

from checkpoints.prepare_default_model import ensure_default_checkpoint
from checkpoints.quantized_default_model import CALIBRATION_TEXT
from marked_tables import markdown_table, write_table
from multilora_engine.quantize import OuterOptions, Scheme, dequantized_weights, quantize_checkpoint, replace_weights
from multilora_engine.quantize.measure import load_float_model, perplexity
from multilora_engine.quantize.text import token_windows
from plots import DOCS
from repository import REPOSITORY
from sources import measured_source
from training.engine_claims import engine_claims
from training.sample_adapters import SAMPLE_ADAPTERS, held_out_prompts

PAGE = DOCS / "models.md"
TABLE = "quantization loss"
TEXT = REPOSITORY / "SECURITY.md"
MAX_NEW_TOKENS = 40


@dataclass(frozen=True)
class Way:
    """A way to round.

    may_lose: the goal, the answers of 24 by which an adapter may do worse than in float32. scheme: of the weights; None
    leaves them as they are. is_calibrated: by the activations of a text. dtype: of the engine's arithmetic, and of
    weights that stay floats. lora_dtype: of stored adapters.
    """

    may_lose: int
    scheme: Scheme | None = None
    is_calibrated: bool = False
    dtype: str = "float32"
    lora_dtype: str = "auto"

    @property
    def is_of_adapters(self) -> bool:
        return self.lora_dtype != "auto"


WAYS = (
    Way(0, dtype="bfloat16"),
    Way(0, Scheme("w8a16")),
    Way(0, Scheme("fp8")),
    Way(2, Scheme("w4a16", 64)),
    Way(2, Scheme("w4a16", 64), is_calibrated=True),
    Way(2, Scheme("w4a16", 32)),
    Way(2, Scheme("w4a16", 32), is_calibrated=True),
    Way(0, lora_dtype="int8"),
    Way(0, lora_dtype="fp8"),
    Way(2, lora_dtype="int4"),
)
"""Groups of 128 do not divide the 576 inputs of the default model's linears."""


@dataclass(frozen=True)
class Loss:
    """One way. weights: in words. claims: of each sample adapter how many held-out answers do what it claims.

    perplexity: None where adapters alone are rounded. may_lose: the goal, the answers by which an adapter may do worse.
    """

    weights: str
    perplexity: float | None
    num_bytes: int
    claims: dict[str, int]
    may_lose: int = 0


def losses(checkpoint: Path, text: Path, calibration: Path) -> Iterator[Loss]:
    """The float weights, then each of WAYS."""
    num_bytes = _weight_bytes(checkpoint)
    claims = engine_claims(checkpoint, "float32", "auto", MAX_NEW_TOKENS)
    yield Loss("float32", _perplexity(checkpoint, None, torch.float32, text), num_bytes, claims)
    for way in WAYS:
        if way.scheme is not None:
            yield _loss_of_scheme(checkpoint, way, way.scheme, text, calibration)
            continue
        claims = engine_claims(checkpoint, way.dtype, way.lora_dtype, MAX_NEW_TOKENS)
        name = f"float32, adapters in {way.lora_dtype}" if way.is_of_adapters else f"{way.dtype}, arithmetic too"
        found = None if way.is_of_adapters else _perplexity(checkpoint, None, getattr(torch, way.dtype), text)
        yield Loss(name, found, num_bytes, claims, way.may_lose)


def _loss_of_scheme(checkpoint: Path, way: Way, scheme: Scheme, text: Path, calibration: Path) -> Loss:
    with tempfile.TemporaryDirectory(prefix="multilora-quantized-") as folder:
        quantized = Path(folder) / "checkpoint"
        report = quantize_checkpoint(
            checkpoint,
            quantized,
            scheme,
            calibration=calibration if way.is_calibrated else None,
            text=None,
            outer=OuterOptions("none"),
            device=torch.device("cpu"),
            on_progress=lambda stage, done, total: None,
        )
        name = f"{report.scheme}{', calibrated' if way.is_calibrated else ''}"
        claims = engine_claims(quantized, way.dtype, way.lora_dtype, MAX_NEW_TOKENS)
        found = _perplexity(checkpoint, quantized, torch.float32, text)
        return Loss(name, found, report.bytes_after, claims, way.may_lose)


def _perplexity(checkpoint: Path, quantized: Path | None, dtype: torch.dtype, text: Path) -> float:
    model = load_float_model(checkpoint, torch.device("cpu"))
    if quantized is not None:
        replace_weights(model, dequantized_weights(quantized))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return perplexity(model, token_windows(checkpoint, text), lambda done, total: None)


def _weight_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def loss_table(measured: list[Loss]) -> str:
    """A row for each kind of weights. Counts below its goal say so."""
    columns = ("weights", "perplexity", "file", *(f"{name}, of {len(held_out_prompts())}" for name in SAMPLE_ADAPTERS))
    rows = [
        (
            loss.weights,
            "" if loss.perplexity is None else f"{loss.perplexity:.1f}",
            f"{loss.num_bytes / 1e6:.0f} MB",
            *(_count(loss.claims[name], measured[0].claims[name] - loss.may_lose) for name in SAMPLE_ADAPTERS),
        )
        for loss in measured
    ]
    return markdown_table(columns, rows)


def _count(count: int, goal: int) -> str:
    return str(count) if count >= goal else f"{count}, missed"


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
