"""The same for ranks that keep their processes: break one line, in the service or in the agent."""

from __future__ import annotations

import pytest
from mutation import Mutant, broken_by, first_seed_that_fails

_HEALING, _SEALING = "rendezvous.rounds.healing", "rendezvous.rounds.sealing"
_PAUSING, _MACHINE = "launcher.supervision", "launcher.supervision"

MUTANTS = (
    Mutant(
        "survivors are restarted for another's death",
        "rendezvous.rounds.policy",
        "plan = plan_restart(state, without=exclude, in_place=not why_not)",
        "plan = plan_restart(state, without=exclude)",
    ),
    Mutant(
        "survivors are restarted when the world grows",
        "rendezvous.rounds.orders",
        "in_place = not obstacle_to_order(state)",
        "in_place = False",
    ),
    Mutant(
        "an exception of the script is healed",
        _HEALING,
        "if cause.failure is FailureClass.USER_EXCEPTION and rule is not PolicyAction.HEAL:",
        "if rule is PolicyAction.FAIL:",
    ),
    Mutant(
        "heals are not counted",
        _HEALING,
        "heals_used=state.heals_used + 1",
        "heals_used=state.heals_used",
    ),
    Mutant(
        "a heal that became a restart is not counted as one",
        "rendezvous.rounds.stopping",
        "return healing.recounted(state, now) if sent.in_place and not final.in_place else state",
        "return state",
    ),
    Mutant(
        "no rank was paused, and the world is sealed in place",
        _SEALING,
        "in_place=len(state.parked) > 0,",
        "in_place=state.generation > 1,",
    ),
    Mutant(
        "new ranks are not told that others continue",
        _SEALING,
        "in_place=len(state.parked) > 0,",
        "in_place=False,",
    ),
    Mutant(
        "paused ranks of a lost node count",
        _HEALING,
        "return without_parked(state, node) if state.phase in (Phase.FORMING, Phase.STOPPING) else state",
        "return state",
    ),
    Mutant(
        "a report of another generation says that ranks can be paused",
        "rendezvous.machine",
        "if member is None or event.generation != state.generation:",
        "if member is None or (event.generation != state.generation and not isinstance(event, HealReady)):",
    ),
    Mutant(
        "a stop in place is answered before all ranks are paused",
        _PAUSING,
        "if not state.in_place or state.is_sweeping or not state.has_stopped:",
        "if not state.in_place or state.is_sweeping:",
    ),
    Mutant(
        "paused ranks are ended with those that were too slow",
        "launcher.supervision",
        "late = tuple(rank for rank in state.live if not _stays(state, rank))",
        "late = state.live",
    ),
    Mutant(
        "paused ranks continue where all others restart",
        _MACHINE,
        "if state.live and (is_other or not (assignment.in_place and max(state.live) < assignment.nproc)):",
        "if state.live and max(state.live) >= assignment.nproc:",
    ),
    Mutant(
        "the end of a paused rank is not reported",
        _PAUSING,
        "    if state.over:  # no later world is known\n        return answer(",
        "    if state.over:\n        return state, ()\n    if False:\n        return answer(",
    ),
    Mutant(
        "ranks that ended since the seal are not reported",
        _MACHINE,
        "return state, (*missing, *sources, *_if(",
        "return state, (*sources, *_if(",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    with broken_by(mutant) as sim:
        assert first_seed_that_fails(sim) is not None
