"""Converts views of ranks to the phase times that the service compares: see rendezvous/diagnosing/stragglers.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.rank_view import RankPhase
from rendezvous.values.straggler_state import PhaseTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rendezvous.values.rank_view import RankView

_COLUMNS = {
    RankPhase.DATA: "data_s",
    RankPhase.FORWARD: "forward_s",
    RankPhase.BACKWARD: "backward_s",
    RankPhase.OPTIMIZER: "optimizer_s",
    RankPhase.IDLE: "idle_s",
    RankPhase.COMMUNICATE: "waiting_s",
}


def phase_times(views: Iterable[RankView]) -> tuple[PhaseTimes, ...]:
    """Return the phase times of ranks that finished a step. Checkpoints, evaluations and sections do not count."""
    return tuple(_times_of(view) for view in views if view.known and view.process.alive and view.step > 0)


def _times_of(view: RankView) -> PhaseTimes:
    spent = {_COLUMNS[phase]: seconds for phase, seconds in view.phase_times if phase in _COLUMNS}
    return PhaseTimes(view.rank, view.step, **spent)
