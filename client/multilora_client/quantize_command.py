"""`multilora quantize`: the command's options and its report. The engine does the work; it is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import TaskID

from multilora_client.errors import InvalidRequest, Unsupported
from multilora_client.terminal import one_line_errors, progress_bars

if TYPE_CHECKING:
    from multilora_engine.quantize import Report

_EXTRA = ("multilora_engine", "torch", "transformers", "compressed_tensors")
_MUCH_WORSE = 1.1
_READERS_OF_ZERO_POINTS = (
    "multilora and compressed-tensors read such a checkpoint, and vLLM one of 4 bits; transformers 5 does not load it."
)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="DIR", help="Hugging Face checkpoint in float32, bfloat16 or float16.")
]
SchemeName = Annotated[
    Literal["w4a16", "w8a16", "fp8"],
    typer.Option("--scheme", help="Integers of 4 or 8 bits, or float8_e4m3fn.", show_default=False),
]
Output = Annotated[Path, typer.Option(help="Directory to write; it must not be there yet.", show_default=False)]
GroupSize = Annotated[
    int | None,
    typer.Option(
        help="Neighbouring inputs of an output that share a scale; -1: all of them.",
        show_default="w4a16: 128, or 64 or 32 if that does not divide all inputs; others: -1",
    ),
]
Asymmetric = Annotated[
    bool,
    typer.Option(
        "--asymmetric",
        help=f"Keep a zero point beside each scale: a little larger, and more exact. {_READERS_OF_ZERO_POINTS}",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="Plain text like that which the model will see: linears are rounded so that their outputs on it change "
        "least, which needs the memory of the whole model."
    ),
]
Head = Annotated[
    Literal["w8a16", "same", "none"],
    typer.Option(help="The output layer: 8 bits with a scale an output, the scheme of the other linears, or floats."),
]
Embeddings = Annotated[
    Literal["w8a16", "none"],
    typer.Option(help="8 bits with a scale a token, which transformers reads and many servers do not, or floats."),
]
Text = Annotated[
    Path | None, typer.Option(help="Plain text to take perplexity of.", show_default="one that comes along")
]
WithPerplexity = Annotated[
    bool,
    typer.Option("--perplexity/--no-perplexity", help="It needs the memory of the whole model; rounding does not."),
]
Device = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="Where to compute.", show_default="cuda if there is one")
]


def quantize(
    directory: Checkpoint,
    scheme: SchemeName,
    output: Output,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    calibration: Calibration = None,
    head: Head = "w8a16",
    embeddings: Embeddings = "none",
    text: Text = None,
    perplexity: WithPerplexity = True,
    device: Device = None,
) -> None:
    """Round a model's linears to 4 or 8 bits, and write it as a checkpoint in compressed-tensors' format.

    Norms stay as they are. An output layer that is the embeddings becomes a copy of them in codes. Adapters of the
    float model go on working.

    \b
    Examples:
      multilora quantize models/llama --scheme w4a16 --output models/llama-w4a16
      multilora quantize models/llama --scheme w4a16 --group-size 32 --calibration chats.txt --output models/llama-g32
    """
    with one_line_errors():
        _check_extra()
        import torch
        from transformers.utils.logging import disable_progress_bar

        from multilora_engine.errors import ConfigError
        from multilora_engine.quantize import SAMPLE_TEXT, OuterOptions, Scheme, quantize_checkpoint

        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidRequest("--device cuda: torch finds no GPU; leave the option out, or write cpu")
        disable_progress_bar()  # There is a bar for each stage already.
        with _progress() as on_progress:
            try:
                report = quantize_checkpoint(
                    directory,
                    output,
                    Scheme(scheme, group_size, not asymmetric),
                    calibration=calibration,
                    text=(text or SAMPLE_TEXT) if perplexity else None,
                    outer=OuterOptions(head, embeddings == "w8a16"),
                    device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
                    on_progress=on_progress,
                )
            except ConfigError as error:
                raise InvalidRequest(str(error)) from error
        typer.echo(f"{output}: {_describe(report)}")
        if is_much_worse(report):
            typer.echo(
                "The perplexity is more than a tenth worse: try --calibration TEXT, a smaller --group-size, "
                "--asymmetric or --scheme w8a16.",
                err=True,
            )
        if asymmetric:
            typer.echo(_READERS_OF_ZERO_POINTS)
        if scheme == "fp8" and perplexity:
            typer.echo(
                "The perplexity is of rounded weights with float activations, as multilora computes; transformers "
                "rounds activations, too."
            )


def _check_extra() -> None:
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise Unsupported(
            f"{' and '.join(missing)} missing; install the extra: pip install './backend_src[quantize]' in a clone"
        )


def is_much_worse(report: Report) -> bool:
    """Whether the perplexity of the rounded model is more than a tenth above that of the floats."""
    before, after = report.perplexity_before, report.perplexity_after
    return before is not None and after is not None and not after <= _MUCH_WORSE * before


def _describe(report: Report) -> str:
    """`30 modules as w4a16, groups of 64; 538.1 -> 170.3 MB; perplexity 18.21 -> 19.02 over 1,482 tokens; ...`."""
    parts = [
        f"{report.num_modules} modules as {report.scheme}",
        f"{report.bytes_before / 1e6:,.1f} -> {report.bytes_after / 1e6:,.1f} MB",
    ]
    if report.perplexity_before is not None:
        assert report.perplexity_after is not None
        before, after = (_short(value) for value in (report.perplexity_before, report.perplexity_after))
        parts.append(f"perplexity {before} -> {after} over {report.num_text_tokens:,} tokens")
    if report.num_calibration_tokens:
        parts.append(f"calibrated on {report.num_calibration_tokens:,} tokens in {report.calibration_seconds:.1f} s")
    return "; ".join([*parts, f"rounded in {report.rounding_seconds:.1f} s"])


def _short(perplexity: float) -> str:
    """`18.207`, `1.23e+300` and `inf`."""
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.3g}"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows the progress of a stage; on a terminal, a bar for each stage."""
    with progress_bars() as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield show
