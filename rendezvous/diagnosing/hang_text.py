"""Text about stalled ranks and the collectives in which they wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rendezvous.values.cause_text import place_of
from rendezvous.values.cause_text import ranks as ranks

if TYPE_CHECKING:
    from rendezvous.diagnosing.waits import Call, Waits
    from rendezvous.values.rank_view import Collective, RankReport


def seconds(duration_s: float) -> str:
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    return f"{duration_s:.0f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def place(report: RankReport, of_several: bool = False) -> str:
    text = place_of(report.phase, report.section)
    return text.replace(" its ", " their ") if of_several else text


def state(report: RankReport) -> str:
    """The state of the rank's process, if it explains the stall."""
    match report.process:
        case "t":
            return "stopped by a debugger"
        case "T":
            return "stopped by a signal (such as SIGSTOP)"
        case "F":
            return "frozen by its cgroup"
        case "D":
            return "in uninterruptible sleep" + (f" in {report.wchan}" if report.wchan else "")
    return "computing" if report.busy else "sleeping"


def doing(report: RankReport) -> str:
    """The activity of a rank, its time without progress, and the state of its process."""
    if not report.alive:
        return "has exited"
    if not report.known:
        return f"has not started to train after {seconds(report.stalled_s)} ({state(report)})"
    if report.is_stopped:
        return f"has been {state(report)} for {seconds(report.stalled_s)}, {place(report)}"
    return f"has made no progress for {seconds(report.stalled_s)} {place(report)} ({state(report)})"


def call(entered: Collective, whole_world: bool = True) -> str:
    """A collective, for example "all_reduce #412 (1,048,576 x float32)"."""
    size = f" ({entered.numel:,} x {entered.dtype})" if entered.dtype else ""
    where = "" if whole_world else f" of group {entered.group}"
    if entered.peer >= 0 and entered.op != "broadcast":
        where += f" with rank {entered.peer}"
    return f"{entered.op} #{entered.seq}{size}{where}"


def wait(numbers: Sequence[int]) -> str:
    return f"{ranks(numbers)} {'waits' if len(numbers) == 1 else 'wait'}"


def waiting_for(waits: Waits, rank: int) -> str:
    """The ranks that wait for this rank, in which call, and the last collective of this rank."""
    awaited = _awaited_in(waits, rank)
    inside = waits.inside[awaited]
    longest = max(inside_s(waits.reports[r], awaited) for r in inside)
    whole = len(waits.members.get(awaited.group, ())) == len(waits.reports)
    have = "has" if len(inside) == 1 else "have"
    entered = call(waits.described[awaited], whole)
    text = f"{ranks(inside)} {have} waited for it for {seconds(longest)} in {entered}"
    if awaited.between is None and rank in waits.reports:
        group = next((g for g in waits.reports[rank].groups if g.name == awaited.group), None)
        text += f"; its last collective is #{group.entered}" if group is not None and group.entered else ""
    return text


def _awaited_in(waits: Waits, rank: int) -> Call:
    """The call in which most ranks wait for this rank."""
    calls = [each for each, missing in waits.missing.items() if rank in missing]
    return max(calls, key=lambda each: (len(waits.inside[each]), -each.seq))


def inside_s(report: RankReport, awaited: Call) -> float:
    where = (awaited.group, awaited.seq)
    return max((c.entered_s for c in report.waits_in if (c.group, c.seq) == where), default=0.0)


def line(report: RankReport) -> str:
    """One line about a rank, for the evidence."""
    parts = [f"rank {report.rank} {doing(report)}"]
    if report.known:
        parts.append(f"step {report.step}")
    if report.calls:
        last = report.calls[-1]
        verb = "finished" if last.finished_s is not None else "entered"
        ago = last.entered_s if last.finished_s is None else last.finished_s
        parts.append(f"{verb} {call(last)} {seconds(ago)} ago")
    if report.message:
        parts.append(f'status: "{report.message}"')
    return "; ".join(parts)
