"""Mutation test of the simulator: break one line of the machines, and expect that the simulator finds it."""

from __future__ import annotations

import pytest
from mutation import Mutant, broken_by, mutants, seed_that_fails

MUTANTS = mutants()


def test_the_table_has_all_mutants() -> None:
    assert len({(each.module, each.old, each.new) for each in MUTANTS}) == len(MUTANTS) >= 53


def test_the_sound_machine_passes_the_same_way() -> None:
    same = "rearm=isinstance(event, DeadlineReached)"
    with broken_by(Mutant("nothing is broken", "rendezvous.machine", same, same)) as sim:
        assert seed_that_fails(sim, seeds=50) is None


# One of six in each run; the night tries them all.
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=[] if number % 6 == 0 else pytest.mark.nightly)
        for number, each in enumerate(MUTANTS)
    ],
)
def test_the_simulator_catches(mutant: Mutant) -> None:
    with broken_by(mutant) as sim:
        assert seed_that_fails(sim, mutant.seed) is not None
