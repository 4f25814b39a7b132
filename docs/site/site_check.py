"""What mkdocs does not look at: `python docs/site/site_check.py build/site` reads the pages that it wrote.

A reader may have no network but that to the site: nothing may be loaded from elsewhere. And Markdown that the parser
took for text is a page that nobody looked at.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link(?=[^>]*rel="?(?:stylesheet|icon|preconnect|preload)))\b[^>]*?"""
    r"""(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)
_LOADED_BY_CSS = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")
_CODE = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)
_LEFT_OVER = re.compile(r"<p>(?:\||```|[-*] |\d+\. |#+ )")


def from_elsewhere(text: str, suffix: str) -> list[str]:
    """Addresses that a browser would ask when it shows this file."""
    css = text if suffix == ".css" else "".join(re.findall(r"<style.*?</style>", text, re.DOTALL))
    html = text if suffix == ".html" else ""
    return _LOADED.findall(html) + _LOADED_BY_CSS.findall(css)


def left_over(html: str) -> list[str]:
    return _LEFT_OVER.findall(_CODE.sub("", html))


def needs_a_renderer(html: str) -> bool:
    """The theme would load mermaid from elsewhere to draw it."""
    return bool(re.search(r'class="[^"]*\bmermaid\b', html))


def faults(site: Path) -> list[str]:
    found = []
    for path in sorted((*site.rglob("*.html"), *site.rglob("*.css"))):
        text, name = path.read_text(), path.relative_to(site)
        found += [f"{name}: is loaded from elsewhere: {each}" for each in from_elsewhere(text, path.suffix)]
        if path.suffix == ".html":
            found += [f"{name}: Markdown that was not understood: {each!r}" for each in left_over(text)]
            if needs_a_renderer(text):
                found.append(f"{name}: a diagram in mermaid; commit it as SVG")
    return found


def main(site: Path) -> int:
    found, pages = faults(site), len(list(site.rglob("*.html")))
    if found or not pages:
        print("\n".join(found) or f"{site} has no pages")
        return 1
    print(f"{pages} pages in {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
