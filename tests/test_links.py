"""Every link between the pages of this repository leads somewhere, every page is linked, and every commit is there."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})\b")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links, without those to other sites."""
    for match in LINK.finditer(FENCED.sub("", page.read_text())):
        target = match[1] or match[2]
        if not re.match(r"\w+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: in lower case, hyphens for spaces, numbered when they repeat."""
    seen: Counter[str] = Counter()
    made = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        made.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return made


def problem(page: Path, link: str) -> str | None:
    """What is wrong with a link of `page`; None when it leads somewhere."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{link}: there is no such file"
    if anchor and anchor not in anchors(target):
        return f"{link}: there is no such heading"
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [said for link in links(page) if (said := problem(page, link))] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        found = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if not link.startswith("#")}
        waiting += [target for target in found if target.suffix == ".md" and target not in reached]
    assert [str(page.relative_to(ROOT)) for page in pages() if page not in reached] == []


def is_in_history(commit: str) -> bool:
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def is_shallow() -> bool:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "true"


@pytest.mark.skipif(is_shallow(), reason="a shallow clone has no history to look into")
def test_figures_are_of_commits_that_the_history_has() -> None:
    """A commit that was rebased away tells nobody which code gave a figure."""
    named = {commit: page for page in pages() for commit in COMMIT.findall(page.read_text())}
    assert len(named) > 10
    assert {commit: page.name for commit, page in named.items() if not is_in_history(commit)} == {}
    assert not is_in_history("0" * 9)


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("b.md", None),
        ("b.md#two-words", None),
        ("b.md#two-words-1", None),
        ("#one", None),
        ("c.md", "c.md: there is no such file"),
        ("b.md#in-a-block", "b.md#in-a-block: there is no such heading"),
        ("../../outside", "../../outside: there is no such file"),
    ],
)
def test_a_dead_link_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, said: str | None) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# One\n")
    (tmp_path / "b.md").write_text("# Two words\n\n```\n# In a block\n```\n\n## [Two](a.md) `words`\n")
    assert problem(page, link) == said
