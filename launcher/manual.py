"""The manual: `ddp-launch docs` lists its pages, `ddp-launch docs hangs` prints one.

Messages name pages in this form. A path would be of no use: the message may come from another node, and an
installation from a wheel has no checkout.
"""

from __future__ import annotations

import os

from launcher.settings.arguments import UsageError
from launcher.settings.values import nearest, printable
from rendezvous.values.error_codes import Code


def folder() -> str:
    """Where the pages are: in the installed package, or in a checkout beside it."""
    here = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(here, "pages")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(here), "docs")


def names() -> list[str]:
    try:
        found = os.listdir(folder())
    except OSError:
        found = []
    return sorted(name.removesuffix(".md") for name in found if name.endswith(".md"))


def text(words: tuple[str, ...]) -> str:
    """The page that the words of the command name, or the list of all pages."""
    known = names()
    if not known:
        raise UsageError(
            f"the manual is not installed: {folder()} has no pages. Install ddp-launch again.",
            code=Code.MANUAL_PAGE_UNKNOWN,
        )
    if not words:
        return _contents(known)
    if len(words) > 1:
        raise UsageError(
            f"unexpected argument {printable(words[1])}. Use ddp-launch docs PAGE.",
            code=Code.INVALID_COMMAND_LINE,
        )
    page = os.path.basename(words[0]).removesuffix(".md")
    if page not in known:
        close = nearest(page, known)
        hint = f"Did you mean {close}?" if close else "Run `ddp-launch docs` for the list."
        raise UsageError(
            f"the manual has no page {printable(words[0])}. {hint}", code=Code.MANUAL_PAGE_UNKNOWN
        )
    return _read(page)


def _contents(known: list[str]) -> str:
    width = max(map(len, known))
    rows = [f"  {name:{width}}  {_title(name)}" for name in known]
    return "\n".join(("Print a page with ddp-launch docs PAGE:", *rows, f"The files are in {folder()}"))


def _title(page: str) -> str:
    return _read(page).partition("\n")[0].lstrip("# ")


def _read(page: str) -> str:
    path = os.path.join(folder(), f"{page}.md")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {printable(path)}: {error}. Check its permissions, or install again.",
            code=Code.FILE_UNREADABLE,
        ) from None
