"""The images are built by a real builder, run as an ordinary user, and serve adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment.clean_root import ImageError
from deployment.image_builder import BASE, ImageBuilder
from deployment.try_images import PAGE, RECIPES, TABLE, Trial, try_image, update_page
from marked_tables import read_cells, read_table

ANSWER = '`{"answer": "Honey", "topic": "animals"}`'


def test_the_page_shows_what_was_seen_of_each_recipe_and_where_it_is_from() -> None:
    rows = read_cells(PAGE, TABLE)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    assert {row["user"] for row in rows} == {"10001:10001"}
    assert all(row["answer of an adapter"] == ("" if row["recipe"] == "proxy" else ANSWER) for row in rows)
    for recipe in RECIPES:
        assert f"\n- {recipe}: By `scripts/run try_images" in read_table(PAGE, TABLE)


def test_a_trial_writes_its_own_row_and_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE.read_text())
    before = {row["recipe"]: row for row in read_cells(page, TABLE)}
    findings = [("built", "9 s"), ("size", "7.7 GB in 3 layers"), ("user", "1:1")]
    update_page(page, [Trial("gpu", findings)], "By a test.")
    after = {row["recipe"]: row for row in read_cells(page, TABLE)}
    assert list(after) == list(RECIPES)
    assert (after["cpu"], after["proxy"]) == (before["cpu"], before["proxy"])
    assert after["gpu"] == dict.fromkeys(before["gpu"], "") | {"recipe": "gpu"} | dict(findings[1:])
    lines, lines_before = (read_table(each, TABLE).splitlines() for each in (page, PAGE))
    assert "- gpu: By a test." in lines
    assert [line for line in lines if line.startswith(("- cpu", "- proxy"))] == [
        line for line in lines_before if line.startswith(("- cpu", "- proxy"))
    ]


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
