"""The console's page in Chromium, before the real server."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from support.console import (
    Pages,
    adapter_row,
    ask,
    axe_violations,
    chromium,
    column,
    started_console,
    upload,
)

from multilora_client import Adapter, Client
from multilora_engine.tritonserver import ServerProcess
from multilora_wire.adapter_names import task_id_of_name

REPOSITORY = Path(__file__).parents[2]
QUESTION = "What do bees make?"
MESSAGES = [{"role": "user", "content": QUESTION}]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
COLUMNS = (
    *("lora_task_id", "name", "tenant", "digest", "status", "location", "bytes", "ranks", "num_pins", "is_pinned"),
    *("last_used_s", "num_hits", "kinds"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def console_url(server: ServerProcess) -> Iterator[str]:
    with started_console(server.grpc_url, f"--http-url=http://{server.http_url}") as url:
        yield url


@pytest.fixture
def open_page(browser: Browser, console_url: str) -> Iterator[Callable[..., Page]]:
    """Opens the console's page. In the end it has had no script's error and asked nobody but the console."""
    pages = Pages(browser)
    yield lambda **options: pages.open(console_url, **options)
    pages.close()
    assert pages.problems == []


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()


def test_a_peft_folder_is_uploaded_pinned_and_unloaded(page: Page, client: Client) -> None:
    told = upload(page, REPOSITORY / "adapters" / "json", "console/json")
    expect(told).to_contain_text("uploaded")
    (info,) = [info for info in client.list_adapters() if info.name == "console/json"]
    assert info.lora_task_id == task_id_of_name("console/json")
    expect(told).to_have_text(f"uploaded, {info.digest[:12]}")
    page.keyboard.press("Escape")

    expect(adapter_row(page, "console/json")).to_contain_text(info.digest[:12])
    expect(adapter_row(page, "console/json").locator(".kinds")).to_have_text("LoRA")
    expect(page.get_by_role("list", name="Events")).to_contain_text("console/json uploaded")
    adapter_row(page, "console/json").click()
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(adapter_row(page, "console/json")).to_contain_text("pinned")
    assert [info.is_pinned for info in client.list_adapters() if info.name == "console/json"] == [True]
    page.get_by_role("button", name="Unpin").click()
    expect(adapter_row(page, "console/json")).not_to_contain_text("pinned")
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("button", name="Really unload?").click()
    expect(adapter_row(page, "console/json")).to_have_count(0)
    assert "console/json" not in [info.name for info in client.list_adapters()]


def test_files_are_dropped_and_what_is_no_adapter_is_said(page: Page, tmp_path: Path, pirate: Adapter) -> None:
    pirate.content.save(tmp_path)
    dropped = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    dialog = page.get_by_role("dialog")
    for files, told in (
        (["readme.txt"], "a PEFT folder has adapter_config.json and adapter_model.safetensors"),
        (["adapter_model.safetensors", "readme.txt"], "adapter_config.json is missing"),
        (["adapter_config.json", "adapter_model.bin"], "save with safe_serialization=True"),
        (["model.lora_weights.npy"], "model.lora_config.npy is missing"),
    ):
        drop(page, dict.fromkeys(files, b"nothing"))
        expect(dialog.get_by_role("alert")).to_contain_text(
            f"No adapter among these files: {told}" if "is" in told else told
        )
        expect(dialog.get_by_role("button", name="Upload")).to_be_disabled()
    drop(page, dropped)
    expect(dialog.get_by_role("alert")).to_be_empty()
    dialog.get_by_label("Name").fill("1")
    dialog.get_by_role("button", name="Upload").click()
    expect(dialog.get_by_role("status")).to_contain_text("uploaded")

    dialog.get_by_role("button", name="Ask it").click()
    expect(dialog).to_have_count(0)
    expect(column(page, "#1")).to_be_visible()
    page.get_by_role("link", name="Adapters").click()
    expect(adapter_row(page, "#1")).to_have_count(1)


def drop(page: Page, files: dict[str, bytes]) -> None:
    """As a person drops files on the page, once the server has answered."""
    expect(page.locator("#connection")).to_have_text("live")
    page.evaluate(
        """(files) => {
          const transfer = new DataTransfer();
          for (const [name, content] of Object.entries(files)) {
            transfer.items.add(new File([Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0))], name));
          }
          for (const kind of ["dragenter", "dragover", "drop"]) {
            const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
            document.body.dispatchEvent(new DragEvent(kind, options));
          }
        }""",
        {name: base64.b64encode(content).decode() for name, content in files.items()},
    )


def test_an_adapter_is_loaded_from_a_source_and_a_refusal_is_shown(page: Page, client: Client) -> None:
    page.get_by_role("button", name="Load from source").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name or task id").fill("nobody")
    dialog.get_by_role("button", name="Load").click()
    expect(dialog.get_by_role("status")).to_contain_text("LoRA adapter 'nobody' not found in cache")
    dialog.get_by_label("Name or task id").fill("emoji")
    dialog.get_by_role("button", name="Load").click()

    expect(dialog).to_have_count(0)
    expect(adapter_row(page, "emoji")).to_contain_text("host")
    assert [info.location for info in client.list_adapters() if info.name == "emoji"] == ["HOST"]


def test_base_and_adapters_answer_side_by_side_as_they_answer_everybody(
    page: Page, client: Client, pirate: Adapter, server: ServerProcess
) -> None:
    digest = client.upload(pirate).lora_digest
    expected = {"base model": client.generate(messages=MESSAGES, max_tokens=8).text}
    expected |= {"#1": client.generate(messages=MESSAGES, max_tokens=8, adapter=1).text}
    adapter_row(page, "#1").click()
    page.get_by_role("button", name="Ask it").click()
    page.get_by_role("button", name="Add a column").click()
    page.locator(".who").last.fill("404404")
    page.locator(".who").last.blur()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Log-probs of tokens").check()
    ask(page, QUESTION, 2)

    for name, text in expected.items():
        answer = column(page, name).locator(".answer")
        assert text_of(answer) == text
    expect(column(page, "#1")).to_contain_text(digest[:12])
    expect(column(page, "#404404")).to_contain_text("LoRA task 404404 not found in cache")
    expect(column(page, "base model").locator(".foot")).to_contain_text("base model")
    column(page, "#1").locator(".token").nth(1).hover()
    expect(page.get_by_role("tooltip").locator(".likely")).to_have_count(5)

    ask(page, "And what do ships carry?", 2)
    expect(column(page, "#1").locator(".answer")).to_have_count(2)
    cached = column(page, "#1").locator(".foot div", has_text="Cached").locator("dd").inner_text()
    assert int(cached.split()[0]) >= 16
    check_code(page, server)


def text_of(answer: Locator) -> str:
    """The text of an answer without the tokens that are none of it, such as the one that ends it."""
    pieces = answer.evaluate(
        """(answer) => [...answer.childNodes]
          .filter((node) => !node.classList?.contains("beyond")).map((node) => node.textContent)"""
    )
    return "".join(pieces)


def check_code(page: Page, server: ServerProcess) -> None:
    """The code that the page shows gives one answer, whatever the language."""
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Question").fill('It\'s "you"? \\ $HOME é\n🌻')
    page.get_by_role("button", name="Code").click()
    dialog = page.get_by_role("dialog")
    answers = set()
    for language in ("curl", "tritonclient", "multilora"):
        dialog.get_by_text(language, exact=True).click()
        code = dialog.get_by_label("Code", exact=True).inner_text()
        command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        answers.add(json.loads(done.stdout)["text_output"] if language == "curl" else done.stdout.removesuffix("\n"))
    assert len(answers) == 1, answers
    dialog.get_by_text("openai", exact=True).click()
    compile(dialog.get_by_label("Code", exact=True).inner_text(), "openai", "exec")


def test_a_stopped_answer_stops_on_the_server(page: Page, client: Client) -> None:
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("Text", exact=True).click()
    page.get_by_label("Max tokens").fill("2000")
    page.get_by_label("Question").fill("1 2 3 4 5 6")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".answer")).not_to_be_empty()
    running = page.locator(".tile", has_text="Running").locator(".value")
    expect(running).to_have_text("1")
    page.get_by_role("button", name="Stop").click()

    expect(page.get_by_text("stopped")).to_be_visible()
    page.get_by_role("link", name="Adapters").click()
    expect(running).to_have_text("0")


def serve(page: Page, path: str, answer: Callable[[Route], Any]) -> None:
    """Answers in the console's place from now on."""
    page.route(re.compile(rf"/api/{path}\b"), answer)


def tell_of_changes(route: Route) -> None:
    """Says each time that an adapter has changed, so that the page asks for the list anew."""
    event = {"kind": "replaced", "lora_task_id": "0", "digest": "", "time_ns": 1, "instance": "", "tenant": ""}
    route.fulfill(json={"events": [event], "last": 1, "num_missed": 0, "stats": None})


def listing(*adapters: dict[str, Any]) -> dict[str, Any]:
    plain = {
        "name": "",
        "tenant": "",
        "digest": "ab" * 16,
        "status": "DOWNLOADED",
        "location": "HOST",
        "bytes": 10**6,
        "ranks": [8],
        "num_pins": 0,
        "is_pinned": False,
        "last_used_s": 1.0,
        "num_hits": 0,
        "kinds": ["LoRA"],
    }
    return {"columns": COLUMNS, "rows": [[(plain | adapter)[name] for name in COLUMNS] for adapter in adapters]}


def test_hostile_names_and_answers_are_shown_as_text(page: Page) -> None:
    """The server takes plain names only; the page does not count on that."""
    fields = {"lora_task_id": "7", "name": HOSTILE, "tenant": HOSTILE, "digest": HOSTILE, "status": HOSTILE}
    event = {"kind": HOSTILE, "lora_task_id": "7", "digest": HOSTILE, "time_ns": 1, "instance": "", "tenant": HOSTILE}
    serve(page, "adapters", lambda route: route.fulfill(json=listing(fields)))
    live = {"events": [event], "last": 10**6, "num_missed": 0, "stats": None}
    serve(page, "live", lambda route: route.fulfill(json=live))
    token = {"text": HOSTILE, "log_prob": -1.0, "top": [{"text": HOSTILE, "log_prob": -1.0}]}
    lines = [{"column": 0, "text": HOSTILE, "tokens": [token]}, {"column": 1, "error": {"message": HOSTILE}}]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    serve(page, "ask", lambda route: route.fulfill(body=body))
    page.reload()

    expect(page.locator(".space span.name")).to_have_text(HOSTILE)
    expect(page.get_by_role("list", name="Events")).to_contain_text(HOSTILE)
    page.locator(".space .row").click()
    expect(page.locator("#details-title")).to_have_text(HOSTILE)
    page.get_by_role("button", name="Ask it").click()
    page.get_by_label("Question").fill(HOSTILE)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".answer").first).to_contain_text(HOSTILE)
    expect(page.locator(".answer .error")).to_contain_text(HOSTILE)
    page.locator(".answer .token").hover()
    expect(page.get_by_role("tooltip")).to_contain_text("onerror")
    page.get_by_role("button", name="Code").click()
    expect(page.get_by_label("Code", exact=True)).to_contain_text("onerror")
    assert page.locator("img[onerror], #content script").count() == 0
    assert "owned" not in page.title()


def test_aliases_are_shown_with_the_shares_of_their_members(page: Page) -> None:
    aliases: list[dict[str, Any]] = []
    serve(page, "adapters", lambda route: route.fulfill(json=listing() | {"aliases": aliases}))
    serve(page, "live", tell_of_changes)
    page.reload()
    expect(page.locator("#view-adapters")).to_be_visible()
    expect(page.locator("#aliases")).to_be_hidden()
    members = [{"name": HOSTILE, "weight": 999}, {"name": "chat-v8", "weight": 1}]
    aliases += [{"name": "chat", "members": members}, {"name": "another's", "members": []}]
    expect(page.locator("#aliases dt")).to_have_text(["chat"])
    expect(page.locator("#aliases dd")).to_have_text(f"{HOSTILE} 100 %, chat-v8 0.1 %")


def test_thousands_of_adapters_are_few_elements_to_filter_and_to_sort(page: Page) -> None:
    adapters = [{"lora_task_id": str(2**62 + i), "name": f"adapter-{i:04}", "bytes": i + 1} for i in range(2000)]
    adapters[1299]["kinds"] = ["DoRA", "tokens"]
    serve(page, "adapters", lambda route: route.fulfill(json=listing(*adapters)))
    page.reload()
    expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "2001")

    assert page.locator(".space .row").count() < 60
    page.get_by_role("columnheader", name="Size").get_by_role("button").click()
    expect(page.locator("#adapter-0")).to_contain_text("adapter-1999")
    page.get_by_role("grid").press("End")
    expect(page.locator("#adapter-1999")).to_contain_text("adapter-0000")
    page.get_by_label("Filter adapters").fill("ADAPTER 1299")
    expect(page.locator("#count")).to_have_text("1 of 2,000")
    expect(page.locator("#adapter-0")).to_contain_text("adapter-1299")
    expect(page.locator("#adapter-0 .kinds")).to_have_text("DoRA, tokens")


def test_a_press_reaches_the_adapter_it_was_meant_for_wherever_the_row_has_gone(page: Page) -> None:
    adapters = [{"lora_task_id": str(i), "name": name, "last_used_s": 9.0 - i} for i, name in enumerate("abc")]
    serve(page, "adapters", lambda route: route.fulfill(json=listing(*adapters)))
    serve(page, "live", tell_of_changes)
    page.reload()
    expect(page.locator("#adapter-0")).to_contain_text("a")
    meant = page.locator("#adapter-0").element_handle()
    adapters[2] = adapters[2] | {"last_used_s": 10.0}
    expect(page.locator("#adapter-0")).to_contain_text("c")
    meant.click()

    expect(page.locator("#details-title")).to_have_text("a")
    assert page.locator(".space span.name").all_inner_texts() == ["c", "a", "b"]


def test_an_unload_is_asked_twice_and_kept_in_mind_while_the_adapter_changes(page: Page) -> None:
    adapter = {"lora_task_id": "7", "name": "busy"}
    now = {"adapter": adapter}
    unloaded: list[Any] = []

    def unload(route: Route) -> None:
        unloaded.append(route.request.post_data_json)
        route.fulfill(status=404, json={"error": {"code": "not_found", "message": "gone already"}})

    serve(page, "adapters", lambda route: route.fulfill(json=listing(now["adapter"])))
    serve(page, "live", tell_of_changes)
    serve(page, "unload", unload)
    page.reload()
    adapter_row(page, "busy").click()
    for name in ("Unload", "Keep it", "Unload"):
        page.get_by_role("button", name=name, exact=True).click()
    now["adapter"] = adapter | {"num_hits": 1234}
    expect(page.locator("#details")).to_contain_text("1,234 hits")
    expect(page.locator(":focus")).to_have_text("Really unload?")
    assert unloaded == []
    page.get_by_role("button", name="Really unload?").click()
    expect(page.get_by_text("gone already")).to_be_visible()
    page.get_by_role("button", name="Close message").click()

    expect(page.get_by_text("gone already")).to_have_count(0)
    assert unloaded == [{"which": {"lora_task_id": "7"}, "tenant": "", "expected_digest": "ab" * 16}]


def test_an_eviction_is_seen_in_its_tier(page: Page) -> None:
    first, second = ({"lora_task_id": str(i), "name": name} for i, name in enumerate(("old", "new")))
    tier = {"bytes_used": 10**6, "bytes_total": 10**6, "num_adapters": 1, "hits": 1, "misses": 1, "evictions": 0}
    events = [{"kind": "uploaded", "lora_task_id": "0", "digest": "", "time_ns": 1, "instance": "", "tenant": ""}]
    now = {"adapters": [first], "tier": tier, "events": events, "last": 10**6}
    real: dict[str, Any] = {}

    def tell(route: Route) -> None:
        real.update(real or route.fetch().json())
        tiers = real["stats"]["tiers"] | {"host": real["stats"]["tiers"]["host"] | now["tier"]}
        stats = real["stats"] | {"tiers": tiers}
        route.fulfill(json={"events": now["events"], "last": now["last"], "num_missed": 0, "stats": stats})

    serve(page, "adapters", lambda route: route.fulfill(json=listing(*now["adapters"])))
    serve(page, "live", tell)
    page.reload()
    host = page.get_by_role("img", name="Host tier")
    expect(host).to_have_attribute("aria-label", "Host tier: 1.0 MB of 1.0 MB, 1 adapter · 50 % hits")
    wait_until_drawn(host)

    evicted = events[0] | {"kind": "evicted"}
    now |= {"adapters": [second], "tier": tier | {"evictions": 1}, "events": [evicted], "last": 10**6 + 1}
    expect(host).to_have_attribute("aria-label", "Host tier: 1.0 MB of 1.0 MB, 1 adapter · 50 % hits · 1 evicted")
    expect(page.get_by_role("list", name="Events")).to_contain_text("evicted from host memory")
    expect(adapter_row(page, "new")).to_have_count(1)
    expect(adapter_row(page, "old")).to_have_count(0)


def wait_until_drawn(canvas: Locator) -> None:
    """Blocks grow: the first picture of them is still empty."""
    canvas.page.wait_for_function(
        """(canvas) => new Set(new Uint32Array(canvas.getContext("2d")
          .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size > 1""",
        arg=canvas.element_handle(),
    )


def test_a_key_is_asked_for_sent_and_never_stored(page: Page) -> None:
    key = "ключ, a secret of 16 characters"
    seen: list[str] = []

    def answer(route: Route) -> None:
        seen.append(route.request.headers.get("authorization", ""))
        if seen[-1] == f"Bearer {key}":  # which Chromium's debugger cannot send on
            route.continue_(headers=route.request.headers | {"authorization": ""})
        else:
            route.fulfill(status=401, json={"error": {"code": "unauthenticated", "message": "no valid API key"}})

    serve(page, "(about|live|adapters)", answer)
    page.reload()
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill("a wrong one")
    dialog.get_by_role("button").last.click()
    expect(page.get_by_text("does not know this key")).to_be_visible()
    dialog.get_by_label("Key", exact=True).fill(key)
    dialog.get_by_role("button").last.click()
    expect(page.locator("#connection")).to_have_text("live")

    assert seen[0] == ""
    stored = page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "16 characters" not in stored
    assert "16 characters" not in json.dumps(page.context.storage_state(indexed_db=True), ensure_ascii=False)
    page.reload()
    expect(page.get_by_role("dialog", name="API key")).to_be_visible()


def test_an_answer_to_an_earlier_key_tells_nothing_of_the_next(page: Page) -> None:
    refusal = {"error": {"code": "unauthenticated", "message": "no valid API key"}}
    is_held, held = False, list[Route]()

    def answer(route: Route) -> None:
        if "authorization" in route.request.headers:
            route.continue_(headers=route.request.headers | {"authorization": ""})
        elif is_held and not held:
            held.append(route)
        else:
            route.fulfill(status=401, json=refusal)

    serve(page, "(about|live|adapters)", answer)
    page.reload()
    expect(page.locator("#connection")).to_have_text("needs a key")
    is_held = True
    with page.expect_request(re.compile("/api/about")):
        dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill("the right one")
    dialog.get_by_role("button", name="Use this key").click()
    held[0].fulfill(status=401, json=refusal)

    expect(page.locator("#connection")).to_have_text("live")
    expect(dialog).to_have_count(0)


def test_a_server_that_is_away_is_said_and_looked_for_again(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")
    away = {"error": {"code": "unavailable", "message": "no server answers at host:8001"}}
    serve(page, "live", lambda route: route.fulfill(status=503, json=away))
    expect(page.get_by_role("alert")).to_contain_text(
        "No server answers at host:8001. Trying again. The figures are those of"
    )
    expect(page.locator("#connection")).to_have_text("offline")
    expect(page.get_by_role("button", name="Upload")).to_be_disabled()
    page.unroute_all()

    expect(page.locator("#connection")).to_have_text("live")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.get_by_role("button", name="Upload")).to_be_enabled()


def test_before_the_first_answer_the_page_says_nothing_of_adapters(page: Page) -> None:
    raw = "no server answers at [::1]:8001: failed to connect to all addresses; last error: ipv6:%5B::1%5D:8001"
    away = {"error": {"code": "unavailable", "message": raw}}
    serve(page, "about", lambda route: route.fulfill(status=503, json=away))
    page.reload()

    expect(page.get_by_role("alert")).to_have_text("No server answers at [::1]:8001. Trying again.")
    expect(page.locator("#connection")).to_have_text("offline")
    expect(page.locator("#view-adapters")).to_be_hidden()
    page.unroute_all()
    expect(page.locator("#view-adapters")).to_be_visible()


def test_names_of_events_and_of_the_batch_lead_to_their_adapters(page: Page) -> None:
    real: dict[str, Any] = {}
    event = {"kind": "uploaded", "lora_task_id": "7", "digest": "", "time_ns": 1, "instance": "", "tenant": ""}

    def tell(route: Route) -> None:
        real.update(real or route.fetch().json())
        load = real["stats"]["load"] | {"adapters": {"running": ["busy"], "waiting": []}}
        stats = real["stats"] | {"load": load}
        route.fulfill(json={"events": [event], "last": 10**6, "num_missed": 0, "stats": stats})

    serve(page, "adapters", lambda route: route.fulfill(json=listing({"lora_task_id": "7", "name": "busy"})))
    serve(page, "live", tell)
    page.reload()
    for place in ("#events", "#batch"):
        page.locator(place).get_by_role("button", name="busy").first.click()
        expect(page.locator("#details-title")).to_have_text("busy")
        page.get_by_role("button", name="Close details").click()


def test_a_columns_picker_offers_every_adapter_and_keeps_its_own(page: Page) -> None:
    adapters = [{"lora_task_id": str(i), "name": name, "last_used_s": float(i)} for i, name in enumerate("abc", 1)]
    serve(page, "adapters", lambda route: route.fulfill(json=listing(*adapters)))
    page.reload()
    expect(adapter_row(page, "c")).to_have_count(1)
    page.get_by_role("link", name="Playground").click()
    page.get_by_role("button", name="Add a column").click()
    who = page.locator(".who").last
    expect(who).to_have_attribute("placeholder", "c")
    who.blur()
    expect(who).to_have_value("c")
    expect(column(page, "c")).to_be_visible()
    who.click()
    expect(who).to_have_value("")
    who.fill("base model")
    who.blur()
    expect(column(page, "base model")).to_have_count(2)


def test_a_tenants_adapter_is_asked_by_its_version_and_is_another_one_than_the_servers_of_its_name(page: Page) -> None:
    adapters = [
        {"lora_task_id": "7", "name": "pirate", "tenant": tenant, "digest": digest * 16, "last_used_s": last_used_s}
        for tenant, digest, last_used_s in (("", "ab", 2.0), ("acme", "cd", 1.0))
    ]
    asked: list[Any] = []

    def answer(route: Route) -> None:
        asked.append([{**target, "prompt": ""} for target in route.request.post_data_json["targets"]])
        route.fulfill(body=json.dumps({"column": 0, "text": "Arr", "tokens": []}) + "\n")

    serve(page, "adapters", lambda route: route.fulfill(json=listing(*adapters)))
    serve(page, "ask", answer)
    page.reload()
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("Text", exact=True).click()
    page.get_by_label("Question").fill("Hi")
    who = page.locator(".who").first
    for name in ("pirate", "acme@pirate"):
        who.fill(name)
        who.blur()
        expect(page.locator(".answer").first).to_have_count(0)
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".answer").first).to_contain_text("Arr")
    which = {"adapter": {"lora_name": "pirate"}, "prompt": ""}
    assert [targets[0] for targets in asked] == [which, which | {"expected_digest": "cd" * 16}]


@pytest.mark.parametrize("width", [390, 820, 1120, 1440])
def test_no_width_cuts_figures_or_leaves_holes(open_page: Callable[..., Page], width: int) -> None:
    page = open_page(viewport={"width": width, "height": 900})
    adapter: dict[str, Any] = {"lora_task_id": "7", "name": "pirate", "num_hits": 123456, "bytes": 123456789}
    adapter["last_used_s"] = time.time() - 59 * 60
    serve(page, "adapters", lambda route: route.fulfill(json=listing(adapter)))
    page.reload()
    expect(adapter_row(page, "pirate")).to_have_count(1)
    assert sideways(page) == 0
    assert (
        page.locator(".space .cell:visible, .tile .note:visible, .tier-figures:visible").evaluate_all(
            "(cells) => cells.filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.className)"
        )
        == []
    )
    right = page.locator(".tiles").evaluate("(tiles) => tiles.getBoundingClientRect().right")
    last = page.locator(".tile").last.evaluate("(tile) => tile.getBoundingClientRect().right")
    assert abs(right - last) <= 2
    boxes = [page.locator(place).bounding_box() for place in ("#load-button", "#upload-button")]
    assert len({box["y"] for box in boxes if box}) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screen_readers_stumble_over_nothing_serious(
    open_page: Callable[..., Page], scheme: str, client: Client, pirate: Adapter
) -> None:
    client.upload(pirate)
    page = open_page(color_scheme=scheme)
    adapter_row(page, "#1").click()
    page.get_by_role("grid").focus()
    assert axe_violations(page) == []
    for button in ("Upload", "Load from source", "Keyboard shortcuts"):
        page.get_by_role("button", name=button, exact=True).click()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Ask it").click()
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("Log-probs of tokens").check()
    ask(page, QUESTION, 2)
    assert axe_violations(page) == []
    page.get_by_role("button", name="Code").click()
    assert axe_violations(page) == []


def test_the_keyboard_is_enough(page: Page, client: Client, pirate: Adapter) -> None:
    client.upload(pirate)
    expect(adapter_row(page, "#1")).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type(str(pirate.lora_task_id))
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.getAttribute('role')") == "grid":
            break
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#details-title")).to_be_visible()
    tab_to(page, "Ask it")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Playground")).to_have_attribute("aria-current", "page")
    tab_to(page, "Log-probs of tokens")
    page.keyboard.press("Space")
    tab_to(page, "Question")
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    expect(page.locator(".foot dt", has_text="Answered by")).to_have_count(2)
    page.get_by_role("log").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tooltip")).to_contain_text("%")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()


def tab_to(page: Page, name: str) -> None:
    """Presses Tab until the element of this label or text has the keyboard."""
    told = """() => { const e = document.activeElement;
      return [e.ariaLabel, e.labels?.[0]?.textContent, e.textContent].filter(Boolean).map((t) => t.trim()); }"""
    for _ in range(60):
        page.keyboard.press("Tab")
        if name in page.evaluate(told):
            return
    pytest.fail(f"Tab does not lead to {name}")


def test_a_phone_shows_all_without_scrolling_sideways(
    open_page: Callable[..., Page], client: Client, pirate: Adapter
) -> None:
    client.upload(pirate)
    page = open_page(viewport={"width": 375, "height": 740}, has_touch=True)
    expect(adapter_row(page, "#1")).to_have_count(1)
    assert sideways(page) == 0
    adapter_row(page, "#1").tap()
    page.get_by_role("button", name="Ask it").tap()
    expect(page.get_by_label("Question")).to_be_visible()
    assert sideways(page) == 0
    assert axe_violations(page) == []


def sideways(page: Page) -> int:
    return int(page.evaluate("() => document.documentElement.scrollWidth - innerWidth"))


def test_a_read_only_console_offers_nothing_that_changes(
    browser: Browser, server: ServerProcess, client: Client, pirate: Adapter
) -> None:
    client.upload(pirate)
    pages = Pages(browser)
    with started_console(server.grpc_url, "--read-only") as url:
        page = pages.open(url)
        expect(page.get_by_text("read-only")).to_be_visible()
        adapter_row(page, "#1").click()
        expect(page.get_by_role("button", name="Ask it")).to_be_visible()
        assert page.get_by_role("button", name=re.compile("Upload|Load|Pin|Unload")).count() == 0
        drop(page, {"adapter_config.json": b"x", "adapter_model.safetensors": b"x"})
        expect(page.get_by_text("No upload: the page is read-only")).to_be_visible()
        expect(page.get_by_role("dialog")).to_have_count(0)
        pages.close()
    assert pages.problems == []


def test_the_whole_page_is_short(open_page: Callable[..., Page], console_url: str) -> None:
    sizes: dict[str, int] = {}
    page = open_page()
    page.on("response", lambda answer: sizes.update({answer.url: int(answer.headers.get("content-length", 0))}))
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")

    assert f"{console_url}console/main.js" in sizes
    assert sum(sizes.values()) < 300_000
