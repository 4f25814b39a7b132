"""One entry of the table of error codes, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rendezvous.values.error_codes import Code


@dataclass(frozen=True, slots=True)
class Entry:
    code: Code
    meaning: str  # one line
    causes: tuple[str, ...]
    actions: tuple[str, ...]
    example: str  # a message as it is printed, without the code
    page: str = ""  # of the manual


def text(entry: Entry, width: int = 80) -> str:
    """The page of a code, for a terminal."""
    lines = [f"{entry.code}: {entry.code.phrase}", "", fill(entry.meaning, width)]
    for title, items in (("Why it happens:", entry.causes), ("What to do:", entry.actions)):
        lines += ["", title, *(fill(f"- {item}", width, subsequent_indent="  ") for item in items)]
    lines += ["", "Example:", f"  {entry.example} [{entry.code}]"]
    if entry.page:
        lines += ["", f"More: ddp-launch docs {entry.page}"]
    return "\n".join(lines)


def markdown(entry: Entry) -> str:
    """The page of a code, for the documentation."""
    more = [f"More: [{entry.page}](../{entry.page}.md)", ""] if entry.page else []
    lines = (
        *(f"# {entry.code}: {entry.code.phrase}", "", entry.meaning, ""),
        *("```", f"{entry.example} [{entry.code}]", "```", ""),
        *("## Why it happens", "", *(f"- {item}" for item in entry.causes), ""),
        *("## What to do", "", *(f"- {item}" for item in entry.actions), "", *more),
        f"In a terminal: `ddpctl explain {entry.code}`. All codes: [error codes](../errors.md)",
    )
    return "\n".join(lines) + "\n"
