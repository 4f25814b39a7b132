"""Each line of docs/security.md names an existing test; and the page explains every counted reason."""

from __future__ import annotations

import re

from tidy import ROOT

from rendezvous.access.auth import Reason

PAGE = (ROOT / "docs" / "security.md").read_text()
HELD = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows_that_are_held() -> list[list[str]]:
    """Of the tables whose last column says by what."""
    rows, within = [], False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            within = False
        elif cells[-1] == "tested by":
            within = True
        elif within and not set(line) <= set("|- "):
            rows.append(cells)
    return rows


def test_every_line_is_held_by_something() -> None:
    rows = rows_that_are_held()
    assert len(rows) > 20
    bare = [
        cells[0] for cells in rows if not HELD.search(cells[-1]) and cells[-1] not in ("the same", "nothing")
    ]
    assert not bare
    assert [cells[0] for cells in rows if cells[-1] == "nothing"] == [
        "the script itself, and all that it imports"
    ]


def test_the_tests_are_there() -> None:
    named = HELD.findall(PAGE)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert named
    assert not missing


def test_every_reason_is_explained() -> None:
    told = {
        word for line in PAGE.splitlines() if line.startswith("| `") for word in re.findall(r"`(\w+)`", line)
    }
    assert {reason.value for reason in Reason} <= told
