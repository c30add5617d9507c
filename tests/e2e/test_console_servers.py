"""The console before servers of their own: one with API keys, one that dies and comes back, one with 2,000 adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from support.api_keys import write_keys
from support.console import Pages, adapter_row, ask, chromium, column, started_console, upload

from multilora_client import Adapter, Client
from multilora_client.adapter import AdapterTensors
from multilora_engine.tritonserver import ServerProcess
from multilora_wire.adapter_names import task_id_of_name
from servers.tiny_server import tiny_server

OPERATOR, TENANT = "the operator's own secret key", "the secret key of acme"
ENTRIES = (
    {"key": OPERATOR, "adapters": ["*"], "base_model": True, "upload": True, "operate": True},
    {"key": TENANT, "tenant": "acme", "base_model": True, "upload": True},
)
ATTENTION_QUERY, HIDDEN_SIZE = 1, 32
"""The wire's number of a linear of the tiny model, and the width of its input and its output."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[[str], Page]]:
    """Opens a console's page. In the end it has had no script's error and asked nobody but the console."""
    pages = Pages(browser)
    yield pages.open
    pages.close()
    assert pages.problems == []


def tiny_adapter(number: int) -> AdapterTensors:
    """Rank 1 on one linear; no two numbers have the same weights."""
    weights = np.random.default_rng(number).normal(0, 0.1, (1, 2 * HIDDEN_SIZE)).astype(np.float16)
    return AdapterTensors(weights, np.array([[ATTENTION_QUERY, 0, 1]], np.int32), "FP16")


def first_paint_ms(page: Page) -> float:
    """Milliseconds from the beginning of the navigation until the browser has drawn something of the page."""
    return float(page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime"))


def enter_key(page: Page, key: str) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(key)
    dialog.get_by_role("button", name="Use this key").click()


@pytest.mark.long(reason="a server of its own; see test_console.py on a key that is asked for, by answers in its place")
def test_a_server_with_keys_opens_to_the_right_one_and_shows_each_their_own(
    open_page: Callable[[str], Page], tmp_path: Path
) -> None:
    keys, folder = write_keys(tmp_path / "keys.json", *ENTRIES), tmp_path / "mine"
    folder.mkdir()
    tiny_adapter(0).save(folder)
    with tiny_server(api_keys_file=str(keys)) as (server, _), started_console(server.grpc_url) as url:
        page = open_page(url)
        enter_key(page, "a key that nobody has")
        expect(page.get_by_text("does not know this key")).to_be_visible()
        assert page.locator(".space .row").count() == 0
        enter_key(page, OPERATOR)
        expect(page.locator("#connection")).to_have_text("live")
        told = upload(page, folder, "mine")
        expect(told).to_contain_text("uploaded")
        digest = told.inner_text().removeprefix("uploaded, ")
        page.keyboard.press("Escape")
        adapter_row(page, "mine").click()
        page.get_by_role("button", name="Ask it").click()
        page.get_by_label("Max tokens").fill("4")
        ask(page, "Who are you?", 2)
        expect(column(page, "mine").locator(".foot")).to_contain_text(digest)

        tenants = open_page(url)
        enter_key(tenants, TENANT)
        expect(tenants.locator("#connection")).to_have_text("live")
        expect(tenants.locator("#count")).to_have_text("0")
        expect(tenants.locator("#live")).to_be_hidden()


@pytest.mark.long(reason="starts two servers; see test_console.py on a server that is away, by answers in its place")
def test_a_page_outlives_its_server_and_goes_on_with_the_next(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", *ENTRIES)
    with tiny_server(api_keys_file=str(keys)) as (server, _), started_console(server.grpc_url) as url:
        with Client(server.grpc_url, api_key=OPERATOR) as client:
            client.upload(Adapter(5, tiny_adapter(5)))
        page = open_page(url)
        enter_key(page, OPERATOR)
        expect(adapter_row(page, "#5")).to_have_count(1)
        server.kill()
        expect(page.locator("#connection")).to_have_text("offline")
        expect(page.get_by_role("alert")).to_contain_text("Trying again")

        with ServerProcess(server.successor_options) as successor:
            successor.wait_ready()
            expect(page.locator("#connection")).to_have_text("live")
            expect(page.get_by_role("alert")).to_be_hidden()
            expect(page.get_by_role("list", name="Events")).to_contain_text("the engine was started again")
            expect(adapter_row(page, "#5")).to_have_count(0)
            page.get_by_role("link", name="Playground").click()
            page.get_by_label("Max tokens").fill("4")
            ask(page, "Who are you?", 1)


@pytest.mark.long(reason="uploads 2,000 adapters; see test_console.py on thousands of them, by an answer in its place")
def test_two_thousand_adapters_are_listed_and_any_of_them_answers(open_page: Callable[[str], Page]) -> None:
    names = [f"customers/{number:04}" for number in range(2000)]
    with (
        tiny_server(lora_cache_host_memory_bytes="640MiB") as (server, _),
        Client(server.grpc_url) as client,
        started_console(server.grpc_url) as url,
    ):
        for number, name in enumerate(names):
            client.upload(Adapter(task_id_of_name(name), tiny_adapter(number)), lora_name=name)
        page = open_page(url)
        expect(page.locator("#count")).to_have_text("2,000")
        assert first_paint_ms(page) < 1000
        assert page.locator(".space .row").count() < 60

        page.get_by_label("Filter adapters").fill("customers/1299")
        expect(page.locator("#count")).to_have_text("1 of 2,000")
        adapter_row(page, "customers/1299").click()
        page.get_by_role("button", name="Ask it").click()
        page.get_by_label("Max tokens").fill("4")
        ask(page, "Who are you?", 2)
        (info,) = [info for info in client.list_adapters() if info.name == "customers/1299"]
        expect(column(page, "customers/1299").locator(".foot")).to_contain_text(info.digest[:12])
