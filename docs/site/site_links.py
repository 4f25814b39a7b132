"""Links that leave docs/, and what else of our Markdown the site has to read differently. Pure: text in, text out."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^ *(```+|~~~+)")
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".sh": "bash",
    ".json": "json",
}


def adapted(markdown: str, here: str, uri: str) -> str:
    """The text of the file `here` for the page `uri`: links as the site has them, and lists nested by four spaces."""
    return "\n".join(_adapted(markdown, here, posixpath.dirname(uri) or "."))


def _adapted(markdown: str, here: str, folder: str) -> Iterator[str]:
    def moved(found: re.Match[str]) -> str:
        target = _resolved(found[2], here)
        if target is None or not (ROOT / target).exists():
            return found[0]  # generated, or broken: mkdocs knows
        return f"{found[1]}{posixpath.relpath(uri_of(target), folder)}{found[3] or ''}{found[4]}"

    before = ""
    for line, is_code in _lines(markdown):
        if is_code:
            yield line
        else:
            if line.startswith("|") and before.startswith("<!--"):
                yield ""
            yield _LINK.sub(moved, re.sub(r"^ {2,3}(?=- )", "    ", line))
        before = line


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is code."""
    fence = ""
    for line in markdown.split("\n"):
        found = _FENCE.match(line)
        if fence:
            yield line, True
            fence = "" if found and line.strip() == fence else fence
        else:
            fence = found[1] if found else ""
            yield line, bool(fence)


def targets(markdown: str, here: str) -> Iterator[str]:
    """The files of the repository to which the file `here` links."""
    for line, is_code in _lines(markdown):
        for found in () if is_code else _LINK.finditer(line):
            target = _resolved(found[2], here)
            if target is not None and (ROOT / target).exists():
                yield target


def _resolved(link: str, here: str) -> str | None:
    """The path in the repository; None for what lies outside it."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    return None if target.startswith("..") else target


def uri_of(target: str) -> str:
    """Where the site has this file."""
    if target == "docs" or target.startswith("docs/"):
        uri = target[len("docs/") :]
        return f"{uri}/index.md".lstrip("/") if (ROOT / target).is_dir() else uri
    return f"source/{target}" + ("" if target.endswith(".md") else ".md")


def content_of(target: str) -> str:
    """A file or folder of the repository, as a page."""
    path = ROOT / target
    if target.endswith(".md"):
        return path.read_text()
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.name[0] not in "._")
        rows = [f"- [{name}]({path.name}/{name})" for name in names]
        return "\n".join((f"# {target}", "", *rows, ""))
    return f"# {target}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def unlisted(nav: object, pages: Mapping[str, object] | set[str]) -> set[str]:
    """Pages that the navigation leaves out; an entry that ends with a slash is a folder."""
    listed = set(_entries(nav))
    folders = tuple(each for each in listed if each.endswith("/"))
    return {page for page in pages if page not in listed and not page.startswith(folders)}


def _entries(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _entries(each)


# People search for what they want to do. Otherwise, pages that mention everything come first.
_LESS = ("source/", "decisions/", "reference/", "errors", "faults", "performance", "nightly", "supply-chain")


def weight_of(uri: str) -> float:
    """Of a page among the results of a search."""
    return 0.3 if uri.startswith((*_LESS, "architecture")) else 2.0 if uri.startswith("tutorials/") else 1.0
