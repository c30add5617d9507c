"""The plots of the documents show what their tables say."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from marked_tables import read_cells
from plots import DOCS, IMAGES, PLOTS, Plot, draw, number, seconds


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_plot_is_what_its_table_gives_and_its_page_shows_it(plot: Plot) -> None:
    assert plot.path.read_text() == draw(plot), "run scripts/run plots"
    assert f"(images/{plot.path.name})" in (DOCS / plot.page).read_text()


def test_there_is_no_other_plot() -> None:
    assert {path.name for path in IMAGES.glob("*.svg")} == {plot.path.name for plot in PLOTS}


@pytest.mark.parametrize(
    ("cell", "expected"), [("18.8 MiB", 18.8), ("1,234.5 GiB", 1234.5), ("0.98x", 0.98), ("190", 190.0)]
)
def test_a_cell_is_read_as_its_number(cell: str, expected: float) -> None:
    assert number(cell) == expected


@pytest.mark.parametrize("cell", ["", "–", "noise"])
def test_a_cell_without_a_number_is_refused(cell: str) -> None:
    with pytest.raises(ValueError, match="no number"):
        number(cell)


def test_times_are_in_seconds() -> None:
    assert [seconds("267 ms"), seconds("14.7 s")] == pytest.approx([0.267, 14.7])


def test_lines_of_the_throughput_are_as_high_as_the_tables_numbers() -> None:
    (plot,) = (plot for plot in PLOTS if plot.name == "throughput")
    rows = read_cells(DOCS / plot.page, plot.table)
    svg = plot.path.read_text()
    lines = re.findall(r'<path d="([^"]+)" clip-path="[^"]+" style="fill: none; stroke[^"]*var\(--(?!grid)', svg)
    heights = [[-float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", line)] for line in lines]
    values = [[number(row[mix]) for row in rows] for mix in list(rows[0])[1:4]]
    scale, base = np.polyfit(np.ravel(values), np.ravel(heights), 1)
    assert np.allclose(np.multiply(values, scale) + base, heights, atol=0.01)
    assert scale > 0


def test_every_colour_is_chosen_by_the_screens_theme() -> None:
    for plot in PLOTS:
        svg = plot.path.read_text()
        ElementTree.fromstring(svg)
        style = svg[svg.index("<style>") : svg.index("</style>")]
        assert not re.findall(r"#[0-9a-f]{6}", svg.replace(style, "", 1))
        light, dark = (re.findall(r"--(\w+):(#\w+);", part) for part in style.split("@media"))
        assert [name for name, _ in light] == [name for name, _ in dark]
        for colours in (dict(light), dict(dark)):
            paper = luminance(colours.pop("paper"))
            del colours["grid"]
            assert min(contrast(paper, luminance(colour)) for colour in colours.values()) >= 4.5


def luminance(colour: str) -> float:
    """WCAG's relative luminance of `#rrggbb`."""
    shares = [int(colour[start:end], 16) / 255 for start, end in pairwise((1, 3, 5, 7))]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
