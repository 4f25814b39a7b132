"""A real Chromium without a window, and what it says about a page: errors, long tasks, accessibility."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000
SEVERE = ("serious", "critical")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on this machine: tests/system-packages.sh chromium installs it")
    unconfined = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=unconfined)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, *, theme: str = "light", expects: tuple[str, ...] = ()
) -> Iterator[Page]:
    """A tab of a browser that nobody has used. Errors of the page fail the test, but for those that it expects."""
    context = browser.new_context(viewport={"width": 1360, "height": 850}, color_scheme=theme)  # type: ignore[arg-type]
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    unexpected = [
        each for each in errors if not any(part in each for part in ("Failed to load resource", *expects))
    ]
    assert not unexpected, unexpected


@dataclass
class Task:
    """One task of the main thread of the page: what it used of a processor, and how long it took."""

    cpu_ms: float
    wall_ms: float


@contextlib.contextmanager
def main_thread_of(browser: Browser, page: Page) -> Iterator[list[Task]]:
    """The tasks while the block runs, the longest first; known after it."""
    found: list[Task] = []
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    yield found
    events = json.loads(browser.stop_tracing())["traceEvents"]
    names = [each for each in events if each.get("name") == "thread_name"]
    mains = {(each["pid"], each["tid"]) for each in names if each["args"]["name"] == "CrRendererMain"}
    tasks = [each for each in events if each.get("name", "").endswith("RunTask") and "tdur" in each]
    mine = [each for each in tasks if (each["pid"], each["tid"]) in mains]
    found += [Task(each["tdur"] / 1e3, each["dur"] / 1e3) for each in mine]
    found.sort(key=lambda task: -task.cpu_ms)


def severe_problems(page: Page) -> list[str]:
    """What axe-core finds serious."""
    found: Any = Axe().run(page).response
    return [
        f"{each['id']} ({each['impact']}): {node['target']} {node['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in SEVERE
        for node in each["nodes"]
    ]


def keep(page: Page, name: str, folder: Path) -> None:
    """A screenshot of what is visible."""
    page.screenshot(path=folder / f"page-{name}.png")
