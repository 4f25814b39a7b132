"""Detects ranks that have made no progress for longer than their phase permits. Pure.

Theory of operation
-------------------
A rank makes progress whenever it writes its page: a phase, a step, a collective, a message. The agent adds up the
time without progress between its checks. Only time in which the agent itself ran counts, so a suspended machine or
agent does not make its ranks look stalled. The count of a rank that was stopped starts again when it continues. The
count of a rank that waits for the reader of the launcher's output stays at zero.

The permitted time depends on what the rank does:

    | the rank                                    | TIME given | auto (the larger of both)                     |
    |---------------------------------------------|------------|-----------------------------------------------|
    | has not begun, or waits for the others to   | start      | 30 min                                        |
    | has not finished its first step             | first-step | 30 min                                        |
    | takes a checkpoint                          | checkpoint | 30 min                                        |
    | evaluates, or is in another section         | evaluation | 30 min                                        |
    | is in a section that has a timeout          | that time  | that time                                     |
    | loads data, or runs code outside a phase    | TIME       | 10 min, or 20 times its longest step          |
    | is in another part of a step, and uses CPU  | TIME       | 10 min, or 20 times its longest step          |
    | is in another part, and uses no CPU         | TIME       | 2 min, or 20 times its longest step           |
    | is stopped or frozen, or has ended          | TIME       | 2 min, or 20 times its longest step           |

`auto` suits scripts that were not written for this launcher. A rank that may still be at work gets ten minutes, the
default timeout of torch. If the script sets a process group timeout of more than 30 min, that timeout is the limit. A
rank that has never written its page is ignored. A rank that has ended does not start an inquiry, but the inquiry may
find that it is the cause. An exceeded limit only starts the inquiry:
see rendezvous/diagnosing/diagnosis.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.settings.budgets import ASLEEP_S, AT_WORK_S
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_report import MAX_CALLS, MAX_GROUPS, RankReport
from rendezvous.values.rank_view import HELD, RankPhase, RankView
from rendezvous.values.text_limits import NAME

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from launcher.settings.budgets import Budgets
    from rendezvous.values.rank_view import Collective, GroupView

_STEPS = 20.0
_LONGEST_DEFAULT_S = 1800.0  # the longest default timeout of a process group in torch (Gloo)
_CALLS_OF_START = 50  # a script without steps has begun when it has been through so many collectives
_STRIDE = 3.0  # a check that is later than this many periods means that the agent did not run
_WORDS_CHARS = 200


@dataclass(frozen=True, slots=True)
class StallState:
    """The progress of one process of a rank, as its agent observed it."""

    pid: int
    stalled_s: float = 0.0
    stopped: bool = False
    longest_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    at: float
    ranks: tuple[tuple[int, StallState], ...] = ()

    def of(self, rank: int) -> StallState | None:
        return next((seen for number, seen in self.ranks if number == rank), None)


def look(watch: Watch, views: Iterable[RankView], now: float, period_s: float) -> Watch:
    passed_s = min(max(0.0, now - watch.at), _STRIDE * period_s)
    known = dict(watch.ranks)
    return Watch(now, tuple((view.rank, _seen(known.get(view.rank), view, passed_s)) for view in views))


def excused(views: Iterable[RankView], ranks: Container[int]) -> tuple[RankView, ...]:
    """Return the views as if `ranks` had made progress just now. They wait for a person to read or to type."""
    return tuple(replace(view, quiet_s=0.0) if view.rank in ranks else view for view in views)


def _seen(before: StallState | None, view: RankView, passed_s: float) -> StallState:
    stopped = view.process.alive and view.process.state in HELD
    if before is None or (before.pid != view.pid and view.process.alive):
        return StallState(view.pid, stopped=stopped)
    stalled_s = before.stalled_s + passed_s
    if view.known and view.process.alive:
        stalled_s = min(stalled_s, view.quiet_s)
    if before.stopped and not stopped:
        stalled_s = 0.0
    longest = max(before.longest_step_s, view.last_step_s)
    return replace(before, stalled_s=stalled_s, stopped=stopped, longest_step_s=longest)


def limit_s(view: RankView, seen: StallState, budgets: Budgets) -> float | None:
    """How long the rank may make no progress. None: without a limit."""
    if not budgets.enabled:
        return None
    if not view.process.alive or seen.stopped:
        return _asleep_s(view, seen, budgets)
    if view.section is not None and view.section.timeout_s is not None:
        return view.section.timeout_s
    match view.phase:
        case _ if not view.known:
            return budgets.start_s
        case RankPhase.STARTING:
            return budgets.start_s
        case RankPhase.CHECKPOINT:
            return budgets.checkpoint_s
        case RankPhase.EVALUATION | RankPhase.SECTION:
            return budgets.evaluation_s
        case _ if not _has_begun(view):
            return budgets.first_step_s
        case RankPhase.DATA | RankPhase.IDLE:
            return _at_work_s(view, seen, budgets)
        case RankPhase.COMMUNICATE | RankPhase.EXITING:
            return _asleep_s(view, seen, budgets)
        case _:
            return (
                _at_work_s(view, seen, budgets) if view.process.cpu_moved else _asleep_s(view, seen, budgets)
            )


def _has_begun(view: RankView) -> bool:
    return view.step > 0 or (bool(view.collectives) and view.collectives[-1].number > _CALLS_OF_START)


def _at_work_s(view: RankView, seen: StallState, budgets: Budgets) -> float:
    return budgets.step_s or max(AT_WORK_S, _STEPS * seen.longest_step_s, _group_timeout_s(view))


def _asleep_s(view: RankView, seen: StallState, budgets: Budgets) -> float:
    return budgets.step_s or max(ASLEEP_S, _STEPS * seen.longest_step_s, _group_timeout_s(view))


def _group_timeout_s(view: RankView) -> float:
    """The timeout of the script's process groups, if it is longer than the default of torch."""
    return view.group_timeout_s if view.group_timeout_s > _LONGEST_DEFAULT_S else 0.0


# --- reports ---------------------------------------------------------------------------------------------


def reports(watch: Watch, views: Iterable[RankView], budgets: Budgets) -> tuple[RankReport, ...]:
    return tuple(_report(view, watch.of(view.rank) or StallState(view.pid), budgets) for view in views)


def is_overdue(told: Iterable[RankReport]) -> bool:
    return any(report.known and report.alive and report.is_overdue for report in told)


def _report(view: RankView, seen: StallState, budgets: Budgets) -> RankReport:
    limit, stalled_s = limit_s(view, seen, budgets), seen.stalled_s
    if view.section is not None and view.section.timeout_s is not None and not seen.stopped:
        stalled_s = (
            view.section.since_s
        )  # a section with a timeout says how long it takes, not how long it is quiet
    return RankReport(
        rank=view.rank,
        known=view.known,
        stalled_s=stalled_s,
        limit_s=limit,
        phase=view.phase,
        phase_s=view.phase_s,
        step=view.step,
        section=view.section.name[:_WORDS_CHARS] if view.section is not None else "",
        message=view.message[:_WORDS_CHARS],
        calls=tuple(map(_short, _calls_to_report(view))),
        groups=_groups(view),
        alive=view.process.alive,
        process=view.process.state if view.process.alive else "Z",
        busy=view.process.alive and view.process.cpu_moved and view.process.state not in HELD,
        wchan=view.process.wchan[:_WORDS_CHARS],
    )


def _calls_to_report(view: RankView) -> list[Collective]:
    """Collectives in which the rank waits (oldest first), then finished collectives (latest first)."""
    done = [call for call in view.collectives if call.finished_s is not None]
    chosen = [*view.waiting_in[:MAX_CALLS], *reversed(done)][:MAX_CALLS]
    return sorted(chosen, key=lambda call: call.number)


def _short(call: Collective) -> Collective:
    return replace(
        call,
        group=call.group[: NAME.max_chars],
        op=call.op[: NAME.max_chars],
        dtype=call.dtype[: NAME.max_chars],
    )


def _groups(view: RankView) -> tuple[GroupView, ...]:
    """If there are too many, groups in which the rank waits come first."""
    waited = [call.group for call in view.waiting_in]
    ordered = sorted(view.groups, key=lambda group: group.name not in waited)
    return tuple(
        replace(
            group,
            name=group.name[: NAME.max_chars],
            members=group.members if len(group.members) <= NAME.max_chars else "",
        )
        for group in ordered[:MAX_GROUPS]
    )
