"""The console before a server whose tiers are too small for its adapters."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.console import Pages, axe_results, axe_violations, chromium, started_console

from marked_tables import write_table
from multilora_client import Adapter, Client, convert_peft
from multilora_wire.adapter_names import task_id_of_name
from servers.started_server import started_server
from sources import commit
from training.sample_adapters import STYLE_ADAPTERS

REPOSITORY = Path(__file__).parents[2]
PICTURES = REPOSITORY / "docs" / "images"
DOCUMENT = REPOSITORY / "docs" / "console.md"
AXE_TABLE = (
    "| view | rules that passed | minor or moderate findings | serious or critical |\n| --- | ---: | ---: | ---: |\n"
)
NAMES = (
    *("support-en", "support-de", "legal-summaries", "sql-writer", "code-review", "poet", "triage", "changelog"),
    *("medical-notes", "translate-fr", "translate-ja", "tone-formal", "tone-casual", "extract-json", "unit-tests"),
    *("release-notes", "bees", "sea-shanties", "haiku", "recipes", "math-tutor", "bug-reports", "slogans"),
)
NUM_LOOKS = 12
"""The page's looks at the load before its picture is taken, so that its curves have a shape."""

QUESTIONS = ("What do bees make?", "Who are you?", "Tell me about the sea.")


def upload_variants(client: Client) -> None:
    """Adapters of different contents, made of the sample adapters."""
    samples = [convert_peft(adapter.directory) for _, adapter in sorted(STYLE_ADAPTERS.items())]
    for index, name in enumerate(NAMES):
        sample = samples[index % len(samples)]
        weights = sample.weights.copy()
        weights[0, 0] = index
        client.upload(Adapter(task_id_of_name(name), dataclasses.replace(sample, weights=weights)), lora_name=name)


@contextmanager
def asked(grpc_url: str, names: Sequence[str]) -> Iterator[None]:
    """Adapters are asked meanwhile, the first ones more often."""
    ended = threading.Event()

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        with Client(grpc_url) as client:
            while not ended.is_set():
                name = names[min(len(names), int(chance.paretovariate(0.7))) - 1]
                messages = [{"role": "user", "content": chance.choice(QUESTIONS)}]
                client.generate(messages=messages, lora_name=name, max_tokens=chance.choice((12, 24, 48)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.long(reason="a server of its own, and a minute of load; see test_console.py on evictions")
def test_adapters_are_evicted_and_come_back_before_your_eyes(
    default_model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    overrides = {
        "kv_cache_memory_bytes": "128MiB",
        "max_num_seqs": "8",
        "lora_cache_host_memory_bytes": "96MiB",
        "lora_cache_dir": str(tmp_path),
        "lora_cache_disk_bytes": "400MiB",
    }
    with started_server(default_model_dir, overrides=overrides) as server, Client(server.grpc_url) as client:
        upload_variants(client)
        with started_console(server.grpc_url) as url, chromium() as browser, asked(server.grpc_url, NAMES):
            pages, audits = Pages(browser), dict[str, dict[str, Any]]()
            for scheme in ("light", "dark"):
                page = pages.open(url, color_scheme=scheme)
                watch(page)
                assert axe_violations(page) == []
                audits[f"adapters, {scheme}"] = axe_results(page)
                if request.config.getoption("--screenshots"):
                    page.screenshot(path=PICTURES / f"console-{scheme}.png")
                page.get_by_role("link", name="Playground").click()
                expect(page.get_by_label("Question")).to_be_visible()
                assert axe_violations(page) == []
                audits[f"playground, {scheme}"] = axe_results(page)
            pages.close()
    assert pages.problems == []
    if request.config.getoption("--screenshots"):
        write_axe_report(audits)


def write_axe_report(audits: Mapping[str, dict[str, Any]]) -> None:
    """Write the table of the console's page: a row for each view. audits: axe-core's results by view."""
    rows = [
        f"| {view} | {len(audit['passes'])} | {num_findings(audit, 'minor', 'moderate')} "
        f"| {num_findings(audit, 'serious', 'critical')} |\n"
        for view, audit in audits.items()
    ]
    (version,) = {audit["testEngine"]["version"] for audit in audits.values()}
    command = "scripts/test --all --screenshots tests/e2e/test_console_live.py"
    source = f"By `{command}` with axe-core {version}, commit {commit()}."
    write_table(DOCUMENT, "axe", AXE_TABLE + "".join(rows), source)


def num_findings(audit: dict[str, Any], *impacts: str) -> int:
    """The rules of these impacts that the page breaks."""
    return sum(violation["impact"] in impacts for violation in audit["violations"])


def watch(page: Page) -> None:
    """Waits until an adapter was evicted and another one came back from its file, as the page tells it."""
    events = page.get_by_role("list", name="Events")
    page.locator(".space .row").nth(2).click()
    expect(page.get_by_role("img", name="Host tier")).to_have_attribute("aria-label", re.compile("evicted"))
    expect(events).to_contain_text("evicted from host memory")
    expect(events).to_contain_text("read from disk")
    expect(page.locator(".busy .number").first).to_contain_text("tokens/s")
    curve = page.locator(".tile", has_text="Output").locator("polyline")
    expect(curve).to_have_attribute("points", re.compile(rf"^(\S+ ){{{NUM_LOOKS},}}"))
