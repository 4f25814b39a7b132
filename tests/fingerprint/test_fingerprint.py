"""A rank finds its interpreter as it is under torchrun, or as differences.txt says that it differs."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from habits import EVERY_ROW, HABITS, SHORT
from jobs import Place, drawn_by_each
from known import differences, lines, permitted

from launcher.template import contracts, script_start
from launcher.template.import_variables import FIXED_BY_IMPORT, FIXED_NATIVELY

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from habits import Habit
    from jobs import Seen

NIGHTLY = pytest.mark.nightly(instead="::test_a_rank_is_as_under_torchrun")

_ALL = ("cold", "warm", "pool")


def _compare(habit: Habit, ways: Iterable[str]) -> tuple[list[str], dict[str, list[Seen]], set[str]]:
    """Return what no row permits, the ranks, and the rows that permit something."""
    place, left, started, needed = Place(habit), set(), {}, set()
    try:
        expected = drawn_by_each(place.torchrun())
        for way in ways:
            for start, ranks in place.start(way):
                started[start] = drawn_by_each(ranks)
    finally:
        place.close()
    for start, ranks in started.items():
        for theirs, ours in zip(expected, ranks, strict=True):
            for one, rows in permitted(differences(start, theirs, ours)).items():
                needed.update(row.text for row in rows)
                if not rows:
                    left.add(str(one))
    return sorted(left), started, needed


@pytest.mark.parametrize("name", SHORT)
def test_a_rank_is_as_under_torchrun(name: str) -> None:
    left, *_ = _compare(SHORT[name], ("warm",))
    assert left == []


@NIGHTLY
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", HABITS)
def test_each_habit(name: str) -> None:
    left, started, _ = _compare(HABITS[name], _ALL)
    assert left == []
    if name == "nothing":  # there is something to compare
        assert all("numpy" in started[way][0]["begin"]["modules"] for way in ("warm", "restart", "pool"))
        assert "torch._dynamo" in started["restart"][0]["torch"]["modules"]


@NIGHTLY
@pytest.mark.timeout(1200)
def test_each_row_is_needed() -> None:
    needed: set[str] = set()
    for habit in EVERY_ROW:
        left, _, rows = _compare(habit, _ALL)
        assert left == []
        needed |= rows
    assert [row.text for row in lines() if row.text not in needed] == []


def test_a_new_interpreter_has_imported_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may have scripts with the names of modules of the standard library."""

    def imported() -> set[str]:
        words = [sys.executable, "-c", "import sys; print(*sys.modules)"]
        return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())

    before = imported()
    monkeypatch.setenv("PYTHONPATH", "")
    script_start.announce()
    assert imported() - before == {"faulthandler", "fcntl"}
    assert [vars(contracts)[name] for name in _NAMES] == [vars(script_start)[name] for name in _NAMES]


_NAMES = ("DEBUG", "DEBUG_IN_TERMINAL", "DEBUG_OTHER", "JOINS")

_READS = """
import sys
from launcher.template.import_variables import Reads
reads = Reads()
import torch
print(*reads.end())
"""


def test_scripts_are_searched_for_each_variable_that_torch_reads() -> None:
    """Otherwise a rank notices it, when it is too late to start a new interpreter."""
    done = subprocess.run([sys.executable, "-c", _READS], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert {"PYTORCH_JIT", "TORCH_LOGS"} <= {*names}
    assert [name for name in names if not name.startswith(FIXED_BY_IMPORT + FIXED_NATIVELY)] == []


def test_nothing_is_left_of_a_place(tmp_path: Path) -> None:
    """Here a process that has left its session, as a rank of torchrun does."""
    words = (sys.executable, "-c", _LEAVES, str(tmp_path / "pid"))
    place = Place(replace(HABITS["nothing"], wrapper=words))
    with pytest.raises(AssertionError, match="exit code 1"):
        place.torchrun()
    (pid,) = place._processes()
    assert pid == int((tmp_path / "pid").read_text())
    place.close()
    assert place._processes() == []


_LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    with open(sys.argv[1], "w") as file: file.write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]): time.sleep(0.01)
sys.exit(1)
"""


def _seen(**facts: str) -> Seen:
    return {"begin": {"modules": {"numpy": "imported"}, "process": {"environment": facts}}}


def test_a_difference_is_found_unless_a_row_permits_it() -> None:
    theirs, ours = _seen(A="1", MASTER_ADDR="localhost"), _seen(A="2", MASTER_ADDR="127.0.0.1", DDP_GUARD="x")
    found = permitted(differences("warm", theirs, ours))
    assert [one.fact for one, rows in found.items() if not rows] == ["process/environment/A"]
    assert len(found) == 3
    assert not differences("warm", theirs, copy.deepcopy(theirs))


def test_a_row_holds_for_its_start_and_its_values_only() -> None:
    theirs, ours = _seen(TORCHELASTIC_RESTART_COUNT="0"), _seen(TORCHELASTIC_RESTART_COUNT="1")
    for way, other, is_permitted in (
        ("restart", ours, True),
        ("warm", ours, False),
        ("restart", _seen(), False),
    ):
        ((_one, rows),) = permitted(differences(way, theirs, other)).items()
        assert bool(rows) == is_permitted
