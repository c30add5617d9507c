"""The page's files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from multilora_client.console.page import FILES

MAX_PAGE_BYTES = 300_000
SCRIPTS = sorted(FILES.glob("*.js"))
HTML_SINKS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|\bsetHTML")


def test_all_files_together_are_short() -> None:
    assert sum(path.stat().st_size for path in FILES.iterdir()) < MAX_PAGE_BYTES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_reads_text_as_html(path: Path) -> None:
    assert HTML_SINKS.findall(path.read_text()) == []


def test_the_page_takes_everything_from_its_own_folder() -> None:
    html = (FILES / "index.html").read_text()
    names = re.findall(r'(?:src|href)="([^"#]+)"', html)
    imported = [name for path in SCRIPTS for name in re.findall(r'from "(.+?)"', path.read_text())]

    assert "<style" not in html
    assert not re.search(r"<script(?![^>]*src=)", html)
    assert not re.search(r'\son\w+="|style="', html)
    for name in [*names, *imported]:
        assert (FILES / name).is_file(), name


def test_a_browser_gets_types_that_it_runs(console: TestClient) -> None:
    assert console.get("/main.js").headers["content-type"].startswith("text/javascript")
    assert console.get("/console.css").headers["content-type"].startswith("text/css")
    assert console.get("/icon.svg").headers["content-type"].startswith("image/svg+xml")
