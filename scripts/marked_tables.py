"""Tables of a document that a command writes: the lines between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

import re
from pathlib import Path


def read_table(document: Path, name: str) -> str:
    """The table of this name, as the document has it now."""
    block = _block(name).search(document.read_text())
    assert block is not None, f"{document.name} has lost its marks <!-- {name}: begin --> and end"
    return block[0]


def write_table(document: Path, name: str, table: str) -> None:
    """Put `table` in the place of the document's table of this name."""
    read_table(document, name)
    document.write_text(_block(name).sub(lambda _: table, document.read_text()))


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name}: begin -->\n).*?(?=<!-- {name}: end -->)", re.DOTALL)
