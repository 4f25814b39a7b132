"""docs/elastic-reference.md promises what happens when something fails; each line names the tests that show it."""

from __future__ import annotations

import re

from nightly_marks import names_of_tests
from tidy import ROOT

FILES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def references(cell: str) -> list[str]:
    """`tests/test_x.py`: `test_a`, `test_b`; a file without tests is meant as a whole."""
    found: list[str] = []
    for word in re.findall(r"`([^`]+)`", cell):
        if word.startswith("tests/"):
            found.append(word)
        elif "::" not in found[-1]:
            found[-1] += f"::{word}"
        else:
            found.append(f"{found[-1].partition('::')[0]}::{word}")
    return found


def promises(page: str) -> list[list[str]]:
    """The rows of the tables whose last column has tests."""
    found = []
    for table in page.split("\n\n"):
        head, *rows = [
            line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")
        ] or [[]]
        if head and head[-1] == "tests":
            found += rows[1:]
    return found


def unknown(cell: str) -> list[str]:
    """The tests of a cell that do not exist."""
    missing = []
    for reference in references(cell):
        name, _, test = reference.partition("::")
        if name not in FILES or (test and test not in names_of_tests(FILES[name])):
            missing.append(reference)
    return missing


def test_every_promise_has_its_tests() -> None:
    rows = promises((ROOT / "docs" / "elastic-reference.md").read_text())
    assert len(rows) > 14
    for row in rows:
        assert len(row) == 3, row
        assert references(row[2]), row
        assert not unknown(row[2]), row


def test_the_checks_can_fail() -> None:
    page = "| what | then | tests |\n|---|---|---|\n| a | b | `tests/elastic/test_dcp.py`: `test_nothing` |\n\ntext"
    assert [unknown(row[2]) for row in promises(page)] == [["tests/elastic/test_dcp.py::test_nothing"]]
    assert promises("| what | then |\n|---|---|\n| a | `test_b` |") == []
