"""Lists the decoders of transformers: those with layers of the engine's own, those of transformers' modules, and those
that are refused, with the reason. docs/models.md shows the same table.

Each is tried as a tiny config, without weights.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from checkpoints.tiny_decoders import architectures, tiny_config, write_config
from marked_tables import console_table, markdown_table, write_table
from multilora_engine.errors import ConfigError
from multilora_engine.models.general.trace import Unserved
from multilora_engine.models.registry import FAMILIES, read_model_config
from repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "models.md"
TABLE = "architectures"
OWN, GENERAL = "the engine's own layers", "transformers' layers"
NOT_TRIED = "not tried: its config takes no tiny sizes"
_COLUMNS = ("served by, or refused because", "architectures")


def fate(model_type: str) -> str:
    """`OWN`, `GENERAL`, or the reason why an architecture is refused."""
    if any(family.model_type == model_type for family in FAMILIES.values()):
        return OWN
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = write_config(tiny_config(model_type), Path(directory))
        except Exception:  # of transformers' checks
            return NOT_TRIED
        try:
            read_model_config(config, "transformers")
        except ConfigError as error:
            return error.__cause__.reason if isinstance(error.__cause__, Unserved) else NOT_TRIED
    return GENERAL


def rows_of(fates: Mapping[str, str]) -> list[tuple[str, str]]:
    """The table: the architectures of each fate."""
    of_fate = defaultdict(list)
    for model_type, name in architectures().items():
        of_fate[fates[model_type]].append(name.removesuffix("ForCausalLM"))
    order = sorted(of_fate, key=lambda text: (text != OWN, text != GENERAL, text))
    return [(text, ", ".join(sorted(set(of_fate[text])))) for text in order]


def main(docs: Annotated[bool, typer.Option(help="Write the table into docs/models.md.")] = False) -> None:
    fates = {model_type: fate(model_type) for model_type in track(architectures(), "architectures")}
    rows = rows_of(fates)
    Console().print(console_table(_COLUMNS, rows))
    if docs:
        write_table(PAGE, TABLE, markdown_table(_COLUMNS, rows, numbers=()))
