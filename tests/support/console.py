"""The console as people have it: the command before a server, and its page in Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    expect,
    sync_playwright,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PATIENCE_MS = 120_000
"""How long an element may take to become the expected one, however busy the machine is; a right page takes one look."""

_HTTP_ERROR = "Failed to load resource"
"""What a browser writes about every answer with an error's status."""

expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def started_console(grpc_url: str, *options: str) -> Iterator[str]:
    """`multilora console` with these options more; its URL. grpc_url: host:port of the server."""
    command = [str(Path(sys.executable).with_name("multilora")), "console", "--port=0", f"--url={grpc_url}", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as console:
        assert console.stderr is not None
        try:
            told = ""
            while not (match := re.search(r"console: (\S+)", told)):
                line = console.stderr.readline()
                assert line, told
                told += line
            yield match[1]
        finally:
            console.terminate()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window. No event loop may run in this thread meanwhile."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=str(SCRIPTS / "chromium"), args=_FLAGS, downloads_path=folder
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Pages:
    """Opens pages, and keeps what no page of the console may have: errors of scripts, requests to other places."""

    browser: Browser
    problems: list[str] = field(default_factory=list)
    _contexts: list[BrowserContext] = field(default_factory=list)

    def open(self, url: str, **options: Any) -> Page:
        """A page of a browser without a past. options: as Playwright has them, `color_scheme` or `viewport`."""
        context = self.browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | options)
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._hear)
        page.on("request", lambda request: self._see(request, urlsplit(url).netloc))
        page.goto(url)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and _HTTP_ERROR not in message.text:
            self.problems.append(message.text)

    def _see(self, request: Request, netloc: str) -> None:
        if urlsplit(request.url).netloc != netloc:
            self.problems.append(f"a request to {request.url}")


def axe_violations(page: Page) -> list[str]:
    """Serious and critical findings of axe-core on the page as it is now."""
    return [
        f"{violation['impact']}: {violation['id']}: {node['html']}: {node['failureSummary']}"
        for violation in axe_results(page)["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def axe_results(page: Page) -> dict[str, Any]:
    """All that axe-core says of the page as it is now."""
    source = Path(subprocess.run([SCRIPTS / "axe_core"], capture_output=True, text=True, check=True).stdout.strip())
    # Through the debugger: the page's policy lets nothing else run that is not its own.
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": source.read_text()})
    told = session.send(
        "Runtime.evaluate",
        {"expression": "axe.run()", "awaitPromise": True, "returnByValue": True, "throwOnSideEffect": False},
    )
    session.detach()
    results: dict[str, Any] = told["result"]["value"]
    return results


def adapter_row(page: Page, name: str) -> Locator:
    """The adapter's row in the table."""
    return page.locator(".space .row").filter(has=page.locator(".name", has_text=re.compile(f"^{re.escape(name)}$")))


def upload(page: Page, folder: Path, name: str) -> Locator:
    """Chooses a folder, names it, sends it; the place that tells how it went."""
    page.get_by_role("button", name="Upload", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Folder…").set_input_files(folder)
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_role("button", name="Upload").click()
    return dialog.get_by_role("status")


def ask(page: Page, question: str, num_columns: int) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".foot dt", has_text="Answered by")).to_have_count(num_columns)


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)
