"""Faults by the means that a user has, each on a real job: who did it is said, and nobody else; then it goes on."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import fault_table
import pytest
from fault_play import LENIENT
from suite import CASES, QUICK

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fault_case import Case
    from fault_play import Played

    Plays = dict[str, Future[Played]]

pytestmark = pytest.mark.timeout(300)
_RIGHT_SHARE = 0.95
_EACH = [
    pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.nightly])
    for case in CASES
]


_IN_PLACE = [pytest.param(case, id=case.name) for case in CASES if case.is_played_in_place]


def test_every_name_is_of_one_case() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= QUICK


@pytest.mark.parametrize("case", _EACH)
def test_a_fault(case: Case, plays: Plays) -> None:
    played = plays[case.name].result()
    if played.skipped:
        pytest.skip(played.skipped)
    assert not played.blames_an_innocent, str(played)
    assert played.is_right, str(played)
    assert not played.replay, str(played)
    assert played.is_within(case.may_take_s * slowness()), str(played)


@pytest.mark.nightly(instead=("elastic/test_in_place.py", "shell/test_heals.py"))
@pytest.mark.parametrize("case", _IN_PLACE)
def test_a_fault_in_place(case: Case, plays_in_place: Plays) -> None:
    played = plays_in_place[case.name].result()
    if played.skipped:
        pytest.skip(played.skipped)
    assert not played.blames_an_innocent, str(played)
    assert played.is_right, str(played)
    assert not played.replay, str(played)
    assert played.keeps_survivors or not case.keeps, str(played)


def slowness() -> float:
    """Tests share their machine. What a quiet one needs is shown by `make faults`, which allows no more than that."""
    return max(LENIENT, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def test_all_verdicts_together(plays: Plays) -> None:
    """What is promised of the whole, also where a single case has failed."""
    played = [found for future in plays.values() if not (found := future.result()).skipped]
    if not played:
        pytest.skip("no case was chosen")
    assert not [str(found) for found in played if found.blames_an_innocent]
    assert sum(found.is_right for found in played) >= _RIGHT_SHARE * len(played), fault_table.summary(
        fault_table.results_of(played)
    )


def test_the_page_shows_the_results_of_these_cases() -> None:
    """Made by `make faults`; the times in it are those of the machine on which it was made."""
    results, machine = fault_table.load()
    page = fault_table.PAGE.read_text()
    assert fault_table.with_table(page, results, machine, CASES) == page
    assert list(results) == [case.name for case in fault_table.in_order(CASES)]
    assert sorted(fault_table.names(fault_table.all_rows(results, CASES))) == sorted(results)


def test_a_wrong_verdict_has_a_row_of_its_own() -> None:
    results = copy.deepcopy(fault_table.load()[0])
    results["exception-ours"]["in place"]["correct"] = "no: wrong rank"
    page = fault_table.all_rows(results, CASES)
    assert (
        "| `exception-ours` | the same | rank 1 on vm: ValueError: the batch is bad (in place: no: wrong rank) |"
        in page
    )
    assert "1 wrong ranks named with certainty" in fault_table.summary(results)
