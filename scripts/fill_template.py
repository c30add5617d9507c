"""Fill settings into a model repository, as TensorRT-LLM's users do with their fill_template.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.launch import console, errors_as_one_line
from multilora_engine.tritonserver.repository import CONFIG_NAME, find_model_repository
from multilora_engine.tritonserver.template import RENAMED, copy_repository, fill, parse_substitutions

EPILOG = (
    "Keys are the parameters of generation/config.pbtxt, which docs/configuration.md lists, and those of "
    "TensorRT-LLM's templates: "
    + "".join(f"{theirs} is {ours} here; " for theirs, ours in RENAMED.items())
    + "triton_max_batch_size and preprocessing_instance_count mean what they mean there; decoupled_mode adds the "
    "models tensorrt_llm and tensorrt_llm_bls, and makes them and ensemble for clients that stream (true) or not "
    "(false). Every other key of upstream's is accepted, and named with the reason for which it does nothing here. "
    "An unknown key is an error."
)


def main(
    repository: Annotated[
        Path, typer.Argument(help="Model repository, or any config.pbtxt in one, which stands for all of them.")
    ],
    substitutions: Annotated[
        str, typer.Argument(metavar="KEY:VALUE,KEY:VALUE", help="What to fill in; a comma in a value is written \\,")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to make: a copy of the repository, filled in.")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in_place", "-i", help="Change the repository itself.")] = False,
) -> None:
    """Fill settings into a copy of a model repository, or with -i into the repository itself."""
    with errors_as_one_line():
        source = find_model_repository(
            repository.absolute().parents[1] if repository.name == CONFIG_NAME else repository
        )
        if in_place == (output is not None):
            raise ConfigError("say where to: --output DIR for a copy, or -i for the repository itself")
        values = parse_substitutions(substitutions)
        target = source if output is None else output.absolute()
        if output is not None:
            copy_repository(source, target)
        filling = fill(target, values)
    for key, place in filling.written.items():
        console.print(f"[green]set[/] {escape(key)}: {escape(place)}", soft_wrap=True)
    for key, reason in filling.ignored.items():
        console.print(f"[yellow]ignored[/] {escape(key)}: {escape(reason)}", soft_wrap=True)
