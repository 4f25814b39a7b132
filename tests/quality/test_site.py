"""The documentation site, without its generator: `make site` builds it strictly, and is part of `make test`."""

from __future__ import annotations

import re
import sys

import pytest
import yaml
from tidy import PACKAGES, ROOT

sys.path.append(str(ROOT / "docs" / "site"))

import code_pages
import site_check as check
import site_links as links
import site_reference as reference

from launcher.notify.notifier import EventKind
from launcher.settings.options import OPTIONS
from rendezvous.service import settings
from rendezvous.service.server import Server, ServerOptions
from rendezvous.store.open import MemoryStore


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


def test_pages_that_are_made_from_the_code(tmp_path) -> None:
    reference.write(tmp_path)
    text = (tmp_path / "reference/ddpctl.md").read_text()
    assert "## ddpctl why" in text
    assert "`--cursor-file`" in text
    api = (tmp_path / "reference/python-api.md").read_text()
    assert "### ddp.check_numerics" in api
    assert "#### State.commit" in api
    metrics = (tmp_path / "reference/metrics.md").read_text()
    shown = set(re.findall(r"`ddp_launch_([a-z_]+)`", metrics))
    source = (ROOT / "launcher/health/exposition.py").read_text()
    assert shown >= set(re.findall(r'_(?:family|histogram)\(\s*"([a-z_]+)"', source))
    assert (
        "| `duplicate gpu detected` | user-exception | fail |"
        in (tmp_path / "reference/messages.md").read_text()
    )
    assert "message Join {" in (tmp_path / "reference/protocol.md").read_text()
    for kind in EventKind:
        assert re.search(rf"^\| `{kind}` \| \w", (tmp_path / "reference/events.md").read_text(), re.MULTILINE)


_NAME = re.compile(r"\bDDP_[A-Z][A-Z0-9_]*[A-Z0-9]\b(?!_)")
_BUILT = re.compile(r'\{ENV\}([A-Z_]+)|_flag\(environ, "([A-Z]+)"')  # the code that reads DDP_RENDEZVOUS_*
_NO_VARIABLES = {"DDP_CORE_H"}  # the guard of a C header


def variables_of_the_code() -> set[str]:
    found = {variable for option in OPTIONS for variable in option.variables if variable.startswith("DDP_")}
    found |= {settings.variable(setting) for setting in settings.SETTINGS}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".c", ".h", ".cpp") and path.name.find("_pb2") < 0:
                text = path.read_text()
                found |= set(_NAME.findall(text))
                found |= {f"DDP_RENDEZVOUS_{a or b}" for a, b in _BUILT.findall(text)}
    return found - _NO_VARIABLES


def test_the_reference_has_every_variable_of_the_code_and_no_other() -> None:
    assert set(_NAME.findall(code_pages.environment())) == variables_of_the_code()


def test_the_reference_has_every_metric_of_the_service() -> None:
    """A running service and its page name the same."""
    service = Server(MemoryStore(), ServerOptions(listen=()))
    shown = set(re.findall(r"# TYPE (\S+) (\w+)", service.metrics.text()))
    listed = set(re.findall(r"\| `(\S+)` \| (\w+) \|", "\n".join(code_pages.service_metrics())))
    assert listed == shown
