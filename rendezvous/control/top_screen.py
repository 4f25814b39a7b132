"""The screen of `ddpctl top`, and what its keys do. Pure: rows of text from a view and a size."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.control.top_table import COLUMNS, Head, Row, Sorting, summary, table
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

_REVERSE, _PLAIN, _BOLD = "\x1b[7m", "\x1b[0m", "\x1b[1m"
_MOST_PROBLEMS = 4
_FEWEST_RANKS = 3
_KEYS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up",
    b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "first", b"\x1b[1~": "first", b"g": "first",
    b"\x1b[F": "last", b"\x1b[4~": "last", b"G": "last",
    b"\x1b[C": "next column", b"\x1bOC": "next column", b">": "next column", b"s": "next column",
    b"\x1b[D": "previous column", b"\x1bOD": "previous column", b"<": "previous column",
    b"r": "reverse", b" ": "pause", b"p": "pause", b"q": "quit", b"Q": "quit", b"\x03": "quit",
}  # fmt: skip
_HELP = "q quit  <> sort  r reverse  arrows scroll  p pause"


@dataclass(frozen=True, slots=True)
class View:
    head: Head
    rows: tuple[Row, ...] = ()
    sorting: Sorting = Sorting()
    top: int = 0  # the first row of the table that is shown
    is_paused: bool = False
    is_over: bool = False
    note: str = ""  # why the table is not of this moment


def keys_in(data: bytes) -> Iterator[str]:
    return (_NAMES[key] for key in _KEYS.findall(data) if key in _NAMES)


def pressed(view: View, key: str, height: int) -> View:
    """The view after a key. `height`: of the terminal, for the keys that scroll by a page."""
    page = _room(view, height)
    last = max(0, len(view.rows) - page)
    at = COLUMNS.index(view.sorting.column)
    match key:
        case "quit":
            return replace(view, is_over=True)
        case "pause":
            return replace(view, is_paused=not view.is_paused)
        case "reverse":
            return replace(
                view, sorting=replace(view.sorting, is_reversed=not view.sorting.is_reversed), top=0
            )
        case "next column" | "previous column":
            column = COLUMNS[(at + (1 if key == "next column" else -1)) % len(COLUMNS)]
            return replace(
                view, sorting=Sorting(column, column not in ("rank", "node", "phase", "step")), top=0
            )
        case _:
            moved = {"up": -1, "down": 1, "page up": -page, "page down": page, "first": -last, "last": last}
            start = view.top if key not in ("first", "last") else 0 if key == "last" else last
            return replace(view, top=min(last, max(0, start + moved[key])))


def screen(view: View, width: int, height: int, *, color: bool = False) -> list[str]:
    """At most `height` rows of at most `width` columns."""
    upper = _upper(view, height)
    head, rows = table(view.rows, view.sorting, width)
    room = _room(view, height)
    top = min(view.top, max(0, len(rows) - room))
    shown = rows[top : top + room]
    painted = f"{_REVERSE}{head[:width].ljust(width)}{_PLAIN}" if color else head[:width]
    lower = _lower(view, top, len(shown), len(rows))
    body = [line[:width] for line in upper] + [painted] + shown
    body += [""] * (height - 1 - len(body))
    return [*body[: height - 1], lower[:width]]


def _upper(view: View, height: int) -> list[str]:
    lines = summary(view.rows, replace(view.head, problems=()))
    problems = view.head.problems
    most = max(0, min(_MOST_PROBLEMS, height - len(lines) - _FEWEST_RANKS - 2))
    if len(problems) > most:
        problems = (*problems[: max(0, most - 1)], f"and {len(problems) - max(0, most - 1)} more problems")[
            :most
        ]
    return [*lines, *problems]


def _room(view: View, height: int) -> int:
    return max(1, height - 2 - len(_upper(view, height)))


def _lower(view: View, top: int, shown: int, of: int) -> str:
    if view.note:
        return view.note
    which = f"ranks {top + 1}-{top + shown} of {of:,}" if shown < of else ""
    order = f"by {view.sorting.column}{' (descending)' if view.sorting.is_reversed else ''}"
    words = [which, order, "paused" if view.is_paused else "", _HELP]
    return "  ".join(word for word in words if word)
