"""The round machine in all interleavings of small jobs: no property breaks, and every job can end.

`states` are the numbers that were found. If one falls far below, some action of the model never happens any more.
STATES=1000000 explores more of the largest ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import sim_model
from model_checker import Broken, explore
from sim_model import Left, World

from rendezvous.values.events import Ended, Persist, Stop, Tell
from rendezvous.values.types import JobSpec, Recover, RestartBudget, ScaleUp

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.values.events import Effect, Event
    from rendezvous.values.job_state import JobState, Result

_MOST = int(os.environ.get("STATES", "50000"))


@dataclass(frozen=True)
class Case:
    left: Left
    states: int
    nodes: str = "ab"
    min_nodes: int = 2
    spares: int = 0

    def world(self) -> World:
        spec = JobSpec(
            "job",
            self.min_nodes,
            2,
            budget=RestartBudget(1),
            spares=self.spares,
            scale_up=ScaleUp.IMMEDIATE,
            recover=Recover.AUTO,
        )
        return World(spec, tuple(self.nodes), self.left)


_SMALL = {
    "nothing happens": Case(Left(), 300),
    "another replica takes over": Case(Left(replicas=1), 1_806),
}
_LARGE = {
    "an order": Case(Left(orders=1), 10_144),
    "a fault": Case(Left(faults=1), 30_238),
    "an elastic job and a fault": Case(Left(faults=1), 82_344, min_nodes=1),
    # Not to the end: the first so many states of each, breadth first.
    "a spare and a fault": Case(Left(faults=1), _MOST, nodes="abc", spares=1),
    "a fault, and another replica": Case(Left(faults=1, replicas=1), _MOST),
    "a fault and an order": Case(Left(faults=1, orders=1), _MOST),
}


def check(case: Case, most_states: int | None) -> None:
    found = explore(case.world(), most_states)
    assert found.states >= case.states * 0.8
    assert found.ends > 0
    assert found.is_complete or found.states >= _MOST


@pytest.mark.parametrize("name", _SMALL)
def test_no_property_breaks_and_every_job_can_end(name: str) -> None:
    check(_SMALL[name], None)


@pytest.mark.nightly(instead="::test_no_property_breaks_and_every_job_can_end")
@pytest.mark.parametrize("name", _LARGE)
def test_no_property_breaks_in_larger_ones(name: str) -> None:
    check(_LARGE[name], _MOST)


def _without(kind: type[Effect], of: Callable[[Effect], bool] = lambda _: True) -> Callable[..., Result]:
    real = sim_model.step

    def broken(state: JobState, event: Event, now: float) -> Result:
        after, effects = real(state, event, now)
        return after, tuple(e for e in effects if not (isinstance(e, kind) and of(e)))

    return broken


_BROKEN = {
    "a world is not written": (0, _without(Persist)),
    "never ends": (0, _without(Tell, lambda tell: isinstance(tell.message, Ended))),
    "not told to stop": (1, _without(Tell, lambda tell: isinstance(tell.message, Stop))),
}


@pytest.mark.parametrize("words", _BROKEN)
def test_a_broken_machine_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, step = _BROKEN[words]
    monkeypatch.setattr(sim_model, "step", step)
    with pytest.raises(Broken, match=words):
        explore(Case(Left(faults), 0).world(), 20_000)
