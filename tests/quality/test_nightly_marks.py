"""Each test that `make test` leaves out names the tests that stay in its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nightly_marks import WHOLE_FILE, Mark, marked, names_of_tests
from tidy import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TESTS = ROOT / "tests"
FILES = {str(path.relative_to(TESTS)): path for path in sorted(TESTS.rglob("test_*.py"))}
MARKED = {name: marked(path) for name, path in FILES.items()}


def runs_in_make_test(reference: str) -> bool:
    """A file of which something runs, or a test that runs, at least in part."""
    name, _, test = reference.partition("::")
    if name not in FILES:
        return False
    left_out = {mark.test for mark in MARKED[name] if not mark.some_cases}
    if test:
        return test in names_of_tests(FILES[name]) and not {test, WHOLE_FILE} & left_out
    return WHOLE_FILE not in left_out


def test_something_stays_of_each() -> None:
    wrong = []
    for name, found in MARKED.items():
        for mark in found:
            stays = [each if not each.startswith("::") else name + each for each in mark.instead]
            if not mark.some_cases and not (stays and all(runs_in_make_test(each) for each in stays)):
                wrong.append(f"{name}::{mark.test}: {stays}")
    assert wrong == []
    assert sum(map(len, MARKED.values())) > 100


def test_a_mark_that_has_another_name_would_not_be_left_out() -> None:
    old = "mark." + "soak"
    assert [name for name, path in FILES.items() if old in path.read_text()] == []


def test_the_simulator_runs_fewer_seeds_than_nightly() -> None:
    seeds = [int(each) for each in re.findall(r"SEEDS=(\d+)", (ROOT / "Makefile").read_text())]
    assert f"{max(seeds):,} seeds" in (ROOT / "docs" / "nightly.md").read_text()


MARKED_SOURCE = """
import pytest
LATER = pytest.mark.nightly(instead=("::test_never", "core/test_a.py"))
CASES = [1, pytest.param(2, marks=pytest.mark.nightly)]
def test_never(): pass
@pytest.mark.nightly(instead="core/test_b.py::test_it")  # why
def test_all(): pass
@LATER
def test_later(): pass
@pytest.mark.parametrize("x", CASES)
def test_some(x): pass
@pytest.mark.nightly
def test_without_a_reason(): pass
"""


def test_marks_are_found(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(MARKED_SOURCE)
    assert marked(path) == [
        Mark("test_all", ("core/test_b.py::test_it",)),
        Mark("test_later", ("::test_never", "core/test_a.py")),
        Mark("test_some", some_cases=True),
        Mark("test_without_a_reason"),
    ]
    path.write_text("pytestmark = [pytest.mark.nightly(instead='core/test_a.py')]\ndef test_it(): pass\n")
    assert marked(path) == [Mark(WHOLE_FILE, ("core/test_a.py",))]
