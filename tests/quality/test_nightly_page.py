"""docs/nightly.md lists every test that `make test` leaves out, and names the tests that stay in its place."""

from __future__ import annotations

import re

import pytest
from nightly_marks import SOME_CASES, marked, names_of_tests
from tidy import ROOT

PAGE = ROOT / "docs" / "nightly.md"
FILES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
MARKED = {each for name, path in FILES.items() for each in marked(path, name)}


def references(cell):
    """`tests/test_x.py`: `test_a`, `test_b`; a file without tests is meant as a whole."""
    found = []
    for word in re.findall(r"`([^`]+)`", cell):
        if word.startswith("tests/"):
            found.append(word)
        elif "::" not in found[-1]:
            found[-1] += f"::{word}"
        else:
            found.append(f"{found[-1].partition('::')[0]}::{word}")
    return found


def rows():
    """What runs nightly, and what stays."""
    cells = (line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    return [(references(each[0]), references(each[2])) for each in cells]


def runs_in_make_test(reference):
    name, _, test = reference.partition("::")
    if name not in FILES or {name, reference} & MARKED:
        return False
    return test in names_of_tests(FILES[name]) if test else True


def test_the_page_lists_the_marked_tests_and_no_others():
    listed = [each for nightly, _ in rows() for each in nightly]
    assert sorted(listed) == sorted(MARKED)


@pytest.mark.parametrize(("nightly", "stays"), rows(), ids=lambda row: row[0])
def test_something_of_each_stays(nightly, stays):
    assert stays, nightly
    assert [each for each in stays if not runs_in_make_test(each)] == []


def test_a_mark_that_has_another_name_would_not_be_left_out():
    old = "mark." + "soak"
    assert [name for name, path in FILES.items() if old in path.read_text()] == []


def test_the_simulator_runs_fewer_seeds_than_nightly():
    seeds = [int(each) for each in re.findall(r"SEEDS=(\d+)", (ROOT / "Makefile").read_text())]
    assert f"{max(seeds):,} seeds" in PAGE.read_text()


def test_references_are_read():
    assert references("`tests/a.py`: `test_x`, `test_y[...]`; `tests/b.py`") == [
        "tests/a.py::test_x",
        "tests/a.py::test_y[...]",
        "tests/b.py",
    ]


MARKED_SOURCE = """
import pytest
LATER = pytest.mark.nightly
CASES = [1, pytest.param(2, marks=LATER)]
def test_never(): pass
@pytest.mark.nightly  # why
def test_all(): pass
@pytest.mark.parametrize("x", CASES)
def test_some(x): pass
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_others(x): pass
"""


def test_marks_are_found(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(MARKED_SOURCE)
    assert marked(path, "t") == {"t::test_all", f"t::test_some{SOME_CASES}", f"t::test_others{SOME_CASES}"}
    path.write_text("import pytest\npytestmark = [pytest.mark.nightly]\ndef test_it(): pass\n")
    assert marked(path, "t") == {"t"}
