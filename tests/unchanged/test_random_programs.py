"""Small random programs do under ddp-launch what they do under torchrun. `replay.py SEED` shows one of them.

Compared are the exit code, the rank that failed first, the output, the logs of each attempt and rank, the files that
were written, and what is left when the job has ended.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from comparing import KILLED, differences
from outcomes import DdpLaunch, Torchrun
from random_programs import program
from recorded_outcomes import PROGRAMS, key, recorded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RECORDED = recorded()
_PARTS, _OF_A_PART = 20, 50
_TONIGHT = int(time.time() // 86_400) * _PARTS * _OF_A_PART  # programs that nobody has seen


@pytest.fixture(scope="module")
def ddp_launch() -> Iterator[DdpLaunch]:
    server = DdpLaunch()
    yield server
    server.close()


@pytest.mark.parametrize("one", PROGRAMS, ids=key)
def test_as_under_torchrun(one, folder: Path, ddp_launch: DdpLaunch) -> None:
    expected = _RECORDED.get(key(one))
    if expected is None:
        server = Torchrun()
        expected = server.run(one, folder / "torchrun")
        server.close()
    assert differences(one, expected, ddp_launch.run(one, folder / "ours")) == []


def _differing(seeds: range, folder: Path) -> list[str]:
    torchrun, ddp_launch, found = Torchrun(), DdpLaunch(), []
    for seed in seeds:
        one = program(seed)
        theirs, ours = torchrun.run(one, folder / "torchrun"), ddp_launch.run(one, folder / "ours")
        found += [f"{seed}: {each}" for each in differences(one, theirs, ours)]
    torchrun.close()
    ddp_launch.close()
    return found


@pytest.mark.nightly(instead="::test_as_under_torchrun")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(_PARTS))
def test_a_thousand_programs(part: int, folder: Path) -> None:
    first, half = _TONIGHT + part * _OF_A_PART, _OF_A_PART // 2
    halves = [range(first, first + half), range(first + half, first + _OF_A_PART)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(_differing, halves, [folder / "0", folder / "1"]))
    assert [each for half_of_it in found for each in half_of_it] == []


def test_a_difference_is_found(folder: Path, ddp_launch: DdpLaunch) -> None:
    one = next(each for each in PROGRAMS if not each.needs_torch)
    ours = ddp_launch.run(one, folder / "ours")
    other = ddp_launch.run(one, folder / "other")
    other.code, other.left, other.out = 99, ["sleep"], ["a line"]
    kinds = {each.partition(":")[0] for each in differences(one, ours, other)}
    assert {"code", "left", "out"} <= kinds
    ours.code = other.code = KILLED
    assert len(differences(one, ours, other)) == 1  # and not the processes that were still ending
