"""The images are built by a real builder, run as an ordinary user, and serve adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment.clean_root import ImageError
from deployment.image_builder import BASE, ImageBuilder
from deployment.try_images import PAGE, RECIPES, TABLE, Trial, markdown, try_image
from marked_tables import read_cells

ANSWER = '`{"answer": "Honey", "topic": "animals"}`'


def test_the_page_shows_what_was_seen_of_each_recipe() -> None:
    rows = read_cells(PAGE, TABLE)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    assert {row["user"] for row in rows} == {"10001:10001"}
    assert all(row["answer of an adapter"] == ("" if row["recipe"] == "proxy" else ANSWER) for row in rows)
    written = markdown([Trial(row.pop("recipe"), [*row.items()]) for row in read_cells(PAGE, TABLE)])
    assert written.replace("  ", " ") in PAGE.read_text().replace("  ", " ")


@pytest.fixture(scope="module")
def builder() -> Iterator[ImageBuilder]:
    with tempfile.TemporaryDirectory(prefix="multilora-images-") as folder:
        yield ImageBuilder(Path(folder))


@pytest.mark.long(reason="makes a Debian, installs torch in it and compiles the operators: some ten minutes an image")
@pytest.mark.parametrize(
    ("name", "compilers", "most_gb"), [("proxy", "none", 0.3), ("cpu", "none", 2.2), ("gpu", "cc, g++", 2.7)]
)
def test_an_image_serves_as_an_ordinary_user(builder: ImageBuilder, name: str, compilers: str, most_gb: float) -> None:
    seen = dict(try_image(name, builder).findings)
    assert seen["user"] == "10001:10001"
    assert seen["compilers at run time"] == compilers
    assert float(seen["size"].split()[0]) <= most_gb
    assert seen["SIGTERM"].startswith("ends with status 0")
    if name != "proxy":
        assert seen["answer of an adapter"] == ANSWER


@pytest.mark.long(reason="makes a Debian to build in")
def test_a_step_that_fails_is_told_with_its_output(builder: ImageBuilder, tmp_path: Path) -> None:
    builder.make_base()
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nRUN echo no bees here; exit 3\n")
    steps: list[str] = []
    with pytest.raises(ImageError, match="no bees here"):
        builder.build(dockerfile, "localhost/fails", {"BASE_IMAGE": BASE}, steps.append)
    assert len(steps) == 2
