"""The default base model, quantised by `multilora quantize` on first use, beside the float one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console

import multilora_engine
from multilora_engine.quickstart.default_model import MARKER_NAME, ensure_default_checkpoint, marker_content

CALIBRATION_TEXT = Path(multilora_engine.__file__).parent / "quantize" / "sample_text.txt"
"""With 4 bits this text makes up for most of the loss by rounding."""

SchemeName = Literal["w4a16", "w8a16", "fp8"]

OUTER = {"head": "w8a16", "embeddings": "w8a16"}
"""The vocabulary is a large part of a small model."""

QUANTIZER_VERSION = 2
"""Raised whenever `multilora quantize` writes other codes than before, so that an old checkpoint is made again."""

console = Console(stderr=True)


def ensure_quantized_checkpoint(scheme: SchemeName) -> Path:
    """The default model in `scheme`, made again when the float checkpoint is another than it was made of."""
    source = ensure_default_checkpoint()
    quantized = source.with_name(f"{source.name}-{scheme}")
    marker = marker_content() | {"scheme": scheme, "quantizer_version": QUANTIZER_VERSION} | OUTER
    if not is_made(quantized, marker):
        shutil.rmtree(quantized, ignore_errors=True)
        with console.status(f"Quantising to {scheme} (about a minute)"):
            quantize(source, quantized, scheme)
        (quantized / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n")
    return quantized


def quantize(source: Path, output: Path, scheme: str) -> None:
    """`multilora quantize` as the default model is quantised. Raises subprocess.CalledProcessError."""
    command = [str(Path(sys.executable).with_name("multilora")), "quantize", str(source)]
    options = ["--scheme", scheme, "--output", str(output), "--calibration", str(CALIBRATION_TEXT)]
    outer = [word for name, value in OUTER.items() for word in (f"--{name}", value)]
    subprocess.run([*command, *options, *outer, "--no-perplexity"], check=True, stdout=subprocess.DEVNULL)


def is_made(checkpoint: Path, marker: dict[str, object]) -> bool:
    file = checkpoint / MARKER_NAME
    return file.is_file() and json.loads(file.read_text()) == marker
