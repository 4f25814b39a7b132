"""The documentation site, without its generator: `make site` builds it strictly, and is part of `make test`."""

from __future__ import annotations

import re
import sys

import pytest
import yaml
from tidy import ROOT

sys.path.append(str(ROOT / "docs" / "site"))

import site_check as check
import site_links as links
import site_reference as reference

from launcher.notify.job_events import EventKind


class _Settings(yaml.SafeLoader):
    """Of mkdocs, which makes objects of some values."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), _Settings)


def written() -> set[str]:
    docs = ROOT / "docs"
    return {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | set(reference.PAGES)


def test_the_navigation_has_every_page() -> None:
    assert links.unlisted(SETTINGS["nav"], written()) == set(), "enter it in mkdocs.yml"
    assert links.unlisted(SETTINGS["nav"], {"new.md", "decisions/9.md"}) == {"new.md"}


def test_what_make_test_runs_builds_the_site_strictly() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\ntest-steps: lint types quick site processes\n" in makefile
    assert "mkdocs build --quiet --strict" in makefile
    assert set(SETTINGS["validation"]["links"].values()) == {"warn"}


def test_links_that_leave_the_folder_lead_to_pages_of_the_site() -> None:
    text = "[a](../examples/demo.py) [b](ddp.md#x) [c](../README.md) [d](decisions) [e](nowhere.md)"
    text += "\n```\n[f](../README.md)\n```"
    assert links.adapted(text, "docs/logs.md", "logs.md") == (
        "[a](source/examples/demo.py.md) [b](ddp.md#x) [c](source/README.md) [d](decisions/index.md) [e](nowhere.md)"
        "\n```\n[f](../README.md)\n```"
    )
    assert links.adapted("[a](docs/ddp.md)", "README.md", "source/README.md") == "[a](../ddp.md)"
    assert set(links.targets(text, "docs/logs.md")) == {
        "examples/demo.py", "docs/ddp.md", "README.md", "docs/decisions",
    }  # fmt: skip


def test_lists_and_tables_are_laid_out_as_the_site_reads_them() -> None:
    text = "- a\n  - b\n<!-- begin -->\n| c |\n"
    assert links.adapted(text, "docs/logs.md", "logs.md") == "- a\n    - b\n<!-- begin -->\n\n| c |\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>', "loaded from elsewhere"),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/x.css">', "loaded from elsewhere"),
        ("a.html", "<style>@import 'https://fonts.example/x.css'</style>", "loaded from elsewhere"),
        ("a.css", "a { background: url(https://img.example/x.png) }", "loaded from elsewhere"),
        ("a.html", '<pre class="mermaid"><code>a</code></pre>', "mermaid"),
        ("a.html", "<p>| a | b |</p>", "Markdown"),
    ],
)
def test_what_a_reader_should_not_get_is_seen(tmp_path, name: str, text: str, words: str) -> None:
    (tmp_path / "index.html").write_text('<a href="https://pytorch.org">torch</a>')
    assert check.main(tmp_path) == 0
    (tmp_path / name).write_text(text)
    assert [words in each for each in check.faults(tmp_path)] == [True]


def test_a_site_without_pages_is_a_fault(tmp_path) -> None:
    assert check.main(tmp_path) == 1


def test_pages_that_are_made_from_the_code(tmp_path) -> None:
    reference.write(tmp_path)
    text = (tmp_path / "reference/ddpctl.md").read_text()
    assert "## ddpctl why" in text
    assert "`--cursor-file`" in text
    api = (tmp_path / "reference/python-api.md").read_text()
    assert "### ddp.ShardedOptimizer" in api
    assert "#### State.commit" in api
    assert "`DDP_LAUNCH_MAX_RESTARTS`" in (tmp_path / "reference/environment.md").read_text()
    metrics = (tmp_path / "reference/metrics.md").read_text()
    shown = set(re.findall(r"`ddp_launch_([a-z_]+)`", metrics))
    source = (ROOT / "launcher/health/exposition.py").read_text()
    assert shown >= set(re.findall(r'_(?:family|histogram)\(\s*"([a-z_]+)"', source))
    assert "message Join {" in (tmp_path / "reference/protocol.md").read_text()
    for kind in EventKind:
        assert re.search(rf"^\| `{kind}` \| \w", (tmp_path / "reference/events.md").read_text(), re.MULTILINE)
