"""The state of ranks as `ddpctl top` shows it, and one whole step of a rank. Pure."""

from __future__ import annotations

from dataclasses import field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from launcher.health.page import in_words, times_of
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import GpuSeen, RankSeen, StepCall, StepPhase, StepSeen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launcher.machine.gpu_state import Gpu
    from rendezvous.values.questions import LoggedValue
    from rendezvous.values.rank_view import Collective, RankPhase, RankView

# --- rows of the table -----------------------------------------------------------------------------
#
# The state of ranks as `ddpctl top` shows it.

_AS_ON_THE_PAGE = (
    *("rank", "known", "phase", "phase_s", "quiet_s", "step", "step_s", "last_step_s", "mean_step_s"),
    "message",
)


def rank_seen(
    view: RankView,
    local_rank: int,
    *,
    pid: int,
    memory: int,
    gpu: GpuSeen | None,
    starts: int,
    logged: tuple[LoggedValue, ...] = (),
) -> RankSeen:
    times = times_of(view)
    same: dict[str, Any] = {name: getattr(view, name) for name in _AS_ON_THE_PAGE}
    return RankSeen(
        **same,
        local_rank=local_rank,
        pid=pid,
        alive=view.process.alive,
        process=view.process.state,
        spent_s=times.own_s + times.waiting_s,
        waited_s=times.waiting_s,
        memory=memory,
        gpu=gpu,
        starts=starts,
        doing=in_words(view),
        logged=logged,
    )


def gpu_of(local_rank: int, nproc: int, gpus: Sequence[Gpu]) -> GpuSeen | None:
    """The GPU of a rank. Known only where every rank has one of its own, in this order, as scripts choose them."""
    if len(gpus) < nproc or not 0 <= local_rank < len(gpus) or gpus[local_rank].lost:
        return None
    gpu = gpus[local_rank]
    return GpuSeen(gpu.index, gpu.memory_used, gpu.memory_total, gpu.utilization)


# --- one whole step --------------------------------------------------------------------------------
#
# Puts together one whole step of a rank from looks at its status page: its phases and its collectives. Pure.
#
# The page has the start of the present phase, and the last 16 collectives with their times, to the nanosecond. So a
# look every few milliseconds is enough for exact times; only a phase that begins and ends between two looks is
# missed. The first step that ends may have begun before the first look, so the one after it is taken.

_EQUAL_S = 1e-5  # moments of one event, computed from two looks
_MOST_CALLS = 2000


@dataclass(frozen=True, slots=True)
class Looks:
    """What the looks so far have shown. Moments are of the clock of the looks."""

    first_step: int | None = None
    phases: tuple[tuple[float, RankPhase], ...] = ()  # with their starts, in order
    calls: Mapping[int, tuple[Collective, float, float | None]] = field(default_factory=dict)
    seen: StepSeen | None = None


def looked(looks: Looks, view: RankView, now: float) -> Looks:
    first = view.step if looks.first_step is None else looks.first_step
    began = now - view.phase_s
    phases = looks.phases
    if not phases or began - phases[-1][0] > _EQUAL_S:
        phases = (*phases, (began, view.phase))
    calls = dict(looks.calls)
    for each in view.collectives:
        if len(calls) < _MOST_CALLS or each.number in calls:
            ended = None if each.finished_s is None else now - each.finished_s
            calls[each.number] = (each, now - each.entered_s, ended)
    looks = Looks(first, phases, calls)
    return looks if view.step < first + 2 else replace(looks, seen=_step(looks, view, now))


def _step(looks: Looks, view: RankView, now: float) -> StepSeen:
    """The last step that has ended."""
    end = now - view.step_s
    start = end - view.last_step_s
    length = view.last_step_s
    starts = [*looks.phases, (now, view.phase)]
    spans = [(phase, began - start, until - start) for (began, phase), (until, _) in pairwise(starts)]
    phases = tuple(
        StepPhase(phase, max(0.0, began), min(length, until))
        for phase, began, until in spans
        if until > 0 and began < length
    )
    calls = tuple(
        StepCall(
            each.op, each.group, each.dtype, each.numel, each.is_async, began - start, _after(ended, start)
        )
        for each, began, ended in looks.calls.values()
        if began < end and (ended is None or ended > start)
    )
    return StepSeen(view.step, length, phases, calls)


def _after(moment: float | None, start: float) -> float | None:
    return None if moment is None else moment - start
