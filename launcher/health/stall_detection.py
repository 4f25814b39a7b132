"""Detects ranks that may hang. Pure.

Theory of operation
-------------------
A rank makes progress whenever it writes its page: a phase, a step, a collective, a message. The agent adds up the
time without progress between its checks. Only time in which the agent itself ran counts, so a suspended machine or
agent does not make its ranks look stalled. The count of a rank that was stopped starts again when it continues. The
count of a rank that waits for the reader of the launcher's output stays at zero.

By default, there is no limit for what a rank does. A job hangs only if a rank waits for another one, and no rank shows
a sign of life (signs.py) for ASLEEP_S, or for the timeout that the script has set for its process groups if that is
longer. The service decides this, because it sees all ranks. An agent reports both times of each rank: without any sign,
and without a sign other than CPU time of its main thread, which a rank may use up while it waits. It asks for an
inquiry soon after a rank has begun to wait, because ranks that wait in different collectives need no long wait, and
again when a rank is idle since its limit.

With `--hang-timeout TIME`, the user sets limits for the time without progress:

    | the rank                                    | limit       |
    |---------------------------------------------|-------------|
    | has not begun, or waits for the others to   | start       |
    | has not finished its first step             | first-step  |
    | takes a checkpoint                          | checkpoint  |
    | evaluates, or is in another section         | evaluation  |
    | does anything else, is stopped or has ended | TIME        |

In both cases, a section that has a timeout may take that long. A rank that has never written its page, or has ended,
does not start an inquiry. An exceeded limit only starts the inquiry: see rendezvous/diagnosing/diagnosis.py.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from launcher.settings.spec import ASLEEP_S, Budgets
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import (
    ASK_EARLY_S,
    HELD,
    MAX_CALLS,
    MAX_GROUPS,
    Collective,
    GroupView,
    RankPhase,
    RankReport,
    RankView,
)
from rendezvous.values.text_limits import NAME

# --- signs of life ---------------------------------------------------------------------------------
#
# Whether a rank shows signs of life that its status page does not have. Pure.
#
# The kernel counts what a rank and the processes that it has started do. Two looks at these sums, some seconds apart,
# show whether they did something in between. A process that only sleeps still wakes up now and then, for example for
# a watchdog thread, so small amounts do not count.

WINDOW_S = 10.0  # between two looks
_IDLE_SHARE = 0.01  # of a CPU; with the threads of torch and of ours, a process that sleeps uses about 0.3 %
_IDLE_S = 0.015  # the kernel counts CPU time in steps of 10 ms
_IDLE_BYTES_PER_S = 64.0
_IDLE_NETWORK_BYTES_PER_S = 1024.0  # monitors of libraries ask others for news


@dataclass(frozen=True, slots=True)
class Signs:
    """What the processes of a rank have done so far."""

    main_cpu_s: float = 0.0  # of its main thread
    other_cpu_s: float = 0.0  # of its other threads, and of the processes that it has started
    io_bytes: int = 0  # read and written, by all of them: files, pipes and terminals
    network_bytes: int = 0  # sent and received over TCP, by those that are still connected
    output: int = 0  # changes with each output of a rank of this node
    processes: frozenset[int] = frozenset()


def computes(before: Signs, now: Signs, passed_s: float) -> bool:
    return now.main_cpu_s - before.main_cpu_s > _idle_cpu_s(passed_s)


def does_more(before: Signs, now: Signs, passed_s: float) -> bool:
    """Whether there is another sign than CPU time of its main thread, which a rank may also use while it waits."""
    return (
        now.output != before.output
        or now.processes != before.processes
        or now.io_bytes - before.io_bytes > _IDLE_BYTES_PER_S * passed_s
        or now.network_bytes - before.network_bytes > _IDLE_NETWORK_BYTES_PER_S * passed_s
        or now.other_cpu_s - before.other_cpu_s > _idle_cpu_s(passed_s)
    )


def _idle_cpu_s(passed_s: float) -> float:
    return max(_IDLE_SHARE * passed_s, _IDLE_S)


_CALLS_OF_START = 50  # a script without steps has begun when it has been through so many collectives
_STRIDE = 3.0  # a check that is later than this many periods means that the agent did not run
_WARN_AFTER_S = 30.0  # so long after the limit, an inquiry has found no evidence
_JUST_NOW_S = 1.0
_WORDS_CHARS = 200


@dataclass(frozen=True, slots=True)
class StallState:
    """The progress of one process of a rank, as its agent observed it."""

    pid: int
    stalled_s: float = 0.0  # without progress, and without a sign of life where these are looked at
    idle_s: float = 0.0  # the same, if CPU time of its main thread is no sign
    stopped: bool = False
    signs: Signs | None = None  # as of the last look at them
    looked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    at: float
    ranks: tuple[tuple[int, StallState], ...] = ()

    def of(self, rank: int) -> StallState | None:
        return next((seen for number, seen in self.ranks if number == rank), None)


def look(
    watch: Watch,
    views: Iterable[RankView],
    now: float,
    period_s: float,
    looks: Mapping[int, Signs] | None = None,
) -> Watch:
    """`looks`: the signs of life of some ranks."""
    passed_s = min(max(0.0, now - watch.at), _STRIDE * period_s)
    known, looks = dict(watch.ranks), looks or {}
    seen = ((view.rank, _next_state(known.get(view.rank), view, passed_s)) for view in views)
    return Watch(now, tuple((rank, _with_signs(state, looks.get(rank), now)) for rank, state in seen))


def to_look_at(watch: Watch, views: Iterable[RankView], now: float, window_s: float) -> tuple[RankView, ...]:
    """Ranks whose pages say nothing, and whose signs of life were not looked at for a while."""
    seen = dict(watch.ranks)
    return tuple(
        view
        for view in views
        if view.process.alive
        and (not view.known or view.quiet_s >= window_s)
        and (view.rank not in seen or now - seen[view.rank].looked_at >= window_s)
    )


def excused(views: Iterable[RankView], ranks: Container[int]) -> tuple[RankView, ...]:
    """Return the views as if `ranks` had made progress just now. They wait for a person to read or to type."""
    return tuple(replace(view, quiet_s=0.0) if view.rank in ranks else view for view in views)


def _next_state(before: StallState | None, view: RankView, passed_s: float) -> StallState:
    stopped = view.process.alive and view.process.state in HELD
    if before is None or (before.pid != view.pid and view.process.alive):
        return StallState(view.pid, stopped=stopped)
    if before.stopped and not stopped:
        return replace(before, stalled_s=0.0, idle_s=0.0, stopped=False)
    most = view.quiet_s if view.known and view.process.alive else float("inf")
    stalled_s, idle_s = (min(each + passed_s, most) for each in (before.stalled_s, before.idle_s))
    return replace(before, stalled_s=stalled_s, idle_s=idle_s, stopped=stopped)


def _with_signs(state: StallState, now: Signs | None, at: float) -> StallState:
    if now is None:
        return state
    before, passed_s = state.signs, at - state.looked_at
    state = replace(state, signs=now, looked_at=at)
    if before is None or does_more(before, now, passed_s):
        return replace(state, stalled_s=0.0, idle_s=0.0)
    return replace(state, stalled_s=0.0) if computes(before, now, passed_s) else state


def limit_s(view: RankView, seen: StallState, budgets: Budgets) -> float | None:
    """How long the user lets the rank make no progress. None: without a limit."""
    if not budgets.enabled:
        return None
    if view.process.alive and not seen.stopped:
        if view.section is not None and view.section.timeout_s is not None:
            return view.section.timeout_s
        if budgets.step_s is not None:
            return _limit_of_phase_s(view, budgets)
    return budgets.step_s


def _limit_of_phase_s(view: RankView, budgets: Budgets) -> float | None:
    match view.phase:
        case _ if not view.known:
            return budgets.start_s
        case RankPhase.STARTING:
            return budgets.start_s
        case RankPhase.CHECKPOINT:
            return budgets.checkpoint_s
        case RankPhase.EVALUATION | RankPhase.SECTION:
            return budgets.evaluation_s
        case _:
            return budgets.step_s if _has_begun(view) else budgets.first_step_s


def _has_begun(view: RankView) -> bool:
    return view.step > 0 or (bool(view.collectives) and view.collectives[-1].number > _CALLS_OF_START)


# --- reports ---------------------------------------------------------------------------------------------


def reports(watch: Watch, views: Iterable[RankView], budgets: Budgets) -> tuple[RankReport, ...]:
    return tuple(_report(view, watch.of(view.rank) or StallState(view.pid), budgets) for view in views)


def is_overdue(told: Iterable[RankReport]) -> bool:
    """Whether a rank exceeds a limit of the user."""
    return any(report.known and report.alive and report.is_overdue for report in told)


def early_questions(told: Iterable[RankReport]) -> frozenset[tuple[int, int, int]]:
    """Which ranks wait in which call, and for how long: a number that changes after 10 s, 20 s, 40 s, ...

    The service is asked when one of these changes: all ranks may wait now, in different collectives.
    """
    return frozenset(
        (each.rank, each.waits_in[-1].number, int(math.log2(each.waits_s / ASK_EARLY_S)))
        for each in told
        if each.alive and each.idle_s is not None and each.waits_s >= ASK_EARLY_S
    )


def is_idle(told: Iterable[RankReport]) -> bool:
    """Whether a rank of a process group has been idle since its limit."""
    return any(
        each.idle_s >= each.idle_limit_s
        for each in told
        if each.alive and each.groups and each.idle_s is not None and each.idle_limit_s is not None
    )


def waits_for_long(told: Iterable[RankReport]) -> RankReport | None:
    """A rank that waits beyond its limit, without evidence that it hangs."""
    return next(
        (
            each
            for each in told
            if each.idle_limit_s is not None and each.waits_s >= each.idle_limit_s + _WARN_AFTER_S
        ),
        None,
    )


def _report(view: RankView, seen: StallState, budgets: Budgets) -> RankReport:
    limit, stalled_s, idle_s, idle_limit_s = limit_s(view, seen, budgets), seen.stalled_s, None, None
    if limit is None and budgets.enabled:
        idle_s, idle_limit_s = seen.idle_s, max(ASLEEP_S, view.group_timeout_s)
    elif view.section is not None and view.section.timeout_s is not None and not seen.stopped:
        stalled_s = view.section.since_s  # its timeout limits how long it takes, not how long it is quiet
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
        calls=tuple(map(_short, _calls_to_report(view, only_now=idle_s is not None))),
        groups=_groups(view),
        alive=view.process.alive,
        process=view.process.state if view.process.alive else "Z",
        busy=view.process.alive and view.process.cpu_moved and view.process.state not in HELD,
        wchan=view.process.wchan[:_WORDS_CHARS],
        idle_s=idle_s,
        idle_limit_s=idle_limit_s,
    )


def _calls_to_report(view: RankView, *, only_now: bool) -> list[Collective]:
    """Collectives in which the rank waits (oldest first), then finished collectives (latest first).

    `only_now`: without a call that has no end because it failed, or runs while the rank does something else.
    """
    done = [call for call in view.collectives if call.finished_s is not None]
    waits = view.waiting_in if not only_now or _is_inside(view) else ()
    chosen = [*waits[:MAX_CALLS], *reversed(done)][:MAX_CALLS]
    return sorted(chosen, key=lambda call: call.number)


def _is_inside(view: RankView) -> bool:
    """Whether the rank is in a collective now: it has done nothing since it entered the last one.

    A call that has no end may be why a rank ends, so it counts for those that have ended, or may be about to.
    """
    if not view.process.alive or view.phase is RankPhase.EXITING or view.quiet_s <= _JUST_NOW_S:
        return True
    entered_s = view.waiting_in[-1].entered_s if view.waiting_in else float("inf")
    return view.phase is RankPhase.COMMUNICATE or entered_s - view.quiet_s <= _JUST_NOW_S


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
