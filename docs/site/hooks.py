"""What mkdocs does not do by itself: pages that the code generates, and links that leave docs/.

`make site` puts generated pages below build/pages; they join the others here. A page may link to any file of the
repository. The site has no repository beside it, so each such file becomes a page below `source/`: Markdown as it is,
anything else as a listing. Links between all these are rewritten, and mkdocs checks them as it checks its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

sys.path.append(str(Path(__file__).resolve().parent))

import site_links as links

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

GENERATED = links.ROOT / "build" / "pages"
_elsewhere: dict[str, str] = {}  # uri on the site -> path in the repository, of pages that lie outside docs/


def on_config(config: Any) -> Any:
    """Decisions are many, and each has its number: their list needs nobody to keep it."""
    _list_folders(config.nav)
    return config


def _list_folders(nav: Any) -> None:
    for each in nav:
        for title, below in each.items() if isinstance(each, dict) else ():
            if isinstance(below, list):
                _list_folders(below)
            elif below.endswith("/"):
                found = sorted((links.ROOT / "docs" / below).glob("*.md"))
                each[title] = [f"{below}{path.name}" for path in found]


def on_files(files: Files, config: Any) -> Files:
    _elsewhere.clear()
    if not GENERATED.is_dir():
        raise PluginError("build/pages is missing: run `make site`, which generates pages from the code")
    for path in sorted(GENERATED.rglob("*.md")):
        _add(files, config, path.relative_to(GENERATED).as_posix(), path.read_text())
    unread = [file for file in files.documentation_pages() if file.src_uri.endswith(".md")]
    while unread:
        file = unread.pop()
        for target in links.targets(file.content_string, _path(file.src_uri)):
            uri = links.uri_of(target)
            if uri.startswith("source/") and uri not in files.src_uris:
                _elsewhere[uri] = target
                unread.append(_add(files, config, uri, links.content_of(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    page.meta.setdefault("search", {"boost": links.weight_of(uri)})
    return links.adapted(markdown, _path(uri), uri)


def _path(uri: str) -> str:
    """Where the page lies in the repository."""
    return _elsewhere.get(uri, f"docs/{uri}")


def _add(files: Files, config: Any, uri: str, content: str) -> File:
    """A page of the repository is reached by links; the navigation need not list it."""
    if (written := files.get_file_from_path(uri)) is not None:
        files.remove(written)
    file = File.generated(config, uri, content=content)
    if uri.startswith("source/"):
        file.inclusion = InclusionLevel.NOT_IN_NAV
    files.append(file)
    return file
