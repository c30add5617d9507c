"""Tables of results: on the console, and in a document between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table


def read_table(document: Path, name: str) -> str:
    """The table of this name, as the document has it now."""
    block = _block(name).search(document.read_text())
    assert block is not None, f"{document.name} has lost its marks <!-- {name}: begin --> and end"
    return block[0]


def read_cells(document: Path, name: str) -> list[dict[str, str]]:
    """The rows of the table of this name: the text of each cell by the heading of its column."""
    header, _, *rows = [_cells(line) for line in read_table(document, name).splitlines() if line.startswith("|")]
    assert len({*header}) == len(header), f"{document.name}: two columns of {name} have one heading"
    return [dict(zip(header, row, strict=True)) for row in rows]


def write_table(document: Path, name: str, table: str, source: str = "") -> None:
    """Put `table` in the place of the document's table of this name, and below it the sentence where it is from."""
    read_table(document, name)
    block = f"{table}\n{source}\n" if source else table
    document.write_text(_block(name).sub(lambda _: block, document.read_text()))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] | None = None) -> str:
    """A table for a document. numbers: the places of the columns of numbers; all but the first by default."""
    is_number = [place > 0 if numbers is None else place in numbers for place in range(len(columns))]
    lines = [columns, ["---:" if each else "---" for each in is_number], *rows]
    return "".join("|" + "".join(f" {_plain(cell)} |" if cell else " |" for cell in cells) + "\n" for cells in lines)


def console_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", numbers: Container[int] = ()
) -> Table:
    """The same for the console."""
    headings = [Column(name, justify="right" if i in numbers else "left") for i, name in enumerate(columns)]
    table = Table(*headings, title=title or None)
    for cells in rows:
        table.add_row(*map(escape, cells))
    return table


def figure(value: float) -> str:
    """Three digits, and no exponent: `0.798`, `19.5`, `2,003`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain(cell: str) -> str:
    """The text of a cell in one line, with the escapes that it needs."""
    return " ".join(cell.replace("|", "\\|").split())


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name}: begin -->\n).*?(?=<!-- {name}: end -->)", re.DOTALL)
