"""The built site as a reader uses it, in a real Chromium: search, and the choice of a version.

`make test` builds the site before.
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest
from chromium import chromium, opened
from playwright.sync_api import expect
from tidy import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page

SITE = ROOT / "build" / "site"
VERSIONS = [{"version": version, "title": version, "aliases": []} for version in ("2.0.0", "1.0.0")]


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Of version 2.0.0, beside which there is another one, as `make site-version` lays them out."""
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make site")
    folder = tmp_path_factory.mktemp("versions")
    for each in VERSIONS:
        (folder / str(each["version"])).symlink_to(SITE)
    (folder / "versions.json").write_text(json.dumps(VERSIONS))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Files, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with chromium() as browser, opened(browser, f"http://127.0.0.1:{server.server_port}/2.0.0/") as found:
            yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("words", "pages"),
    [
        ("heal", ["Elastic training"]),
        ("NCCL timeout", ["Communication errors", "Hangs"]),
        ("two machines", ["Two machines"]),
        ("max-restarts", ["Options"]),
    ],
)
def test_a_search_finds_the_page(page: Page, words: str, pages: list[str]) -> None:
    page.reload()  # results of the search before may be on their way
    field = page.get_by_role("textbox", name="Search")
    field.click()
    page.keyboard.type(words)
    results = page.locator(".md-search-result__item")
    for title in pages:
        expect(results.get_by_role("heading", name=title, exact=True).first).to_be_visible()
    page.keyboard.press("Escape")


def test_another_version_can_be_chosen(page: Page) -> None:
    chosen = page.locator(".md-version__link")
    expect(chosen).to_have_count(2)
    assert chosen.all_inner_texts() == ["2.0.0", "1.0.0"]


@pytest.mark.nightly(instead="::test_another_version_can_be_chosen")
def test_a_version_is_added_to_a_branch(tmp_path: Path) -> None:
    if not (ROOT / ".venv-site" / ".installed").exists():
        pytest.skip("what builds the site is not installed: make site")
    subprocess.run(("git", "clone", "-q", str(ROOT), str(tmp_path / "clone")), check=True)
    for name in (".venv", ".venv-site"):
        (tmp_path / "clone" / name).symlink_to(ROOT / name)
    made = (
        shutil.which("make"),
        "-o",
        "install",
        "-o",
        ".venv-site/.installed",
        "site-version",
        "SITE_BRANCH=tried",
    )
    done = subprocess.run(made, cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(
        ("git", "ls-tree", "--name-only", "tried"), cwd=tmp_path / "clone", capture_output=True, text=True
    )
    assert {"index.html", "latest", "versions.json"} < set(listed.stdout.split())
