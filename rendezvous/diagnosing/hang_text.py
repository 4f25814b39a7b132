"""Text about stalled ranks and the collectives that they wait in. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.cause_text import ranks as ranks
from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.diagnosing.waits import Call, Waits
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.rank_view import Collective

_PLACES = {
    RankPhase.STARTING: "in its start-up",
    RankPhase.DATA: "in its data loader",
    RankPhase.FORWARD: "in its forward pass",
    RankPhase.BACKWARD: "in its backward pass",
    RankPhase.COMMUNICATE: "waiting for other ranks",
    RankPhase.OPTIMIZER: "in its optimizer",
    RankPhase.CHECKPOINT: "in its checkpoint",
    RankPhase.EVALUATION: "in its evaluation",
    RankPhase.IDLE: "in code of the script, between two phases of a step",
    RankPhase.EXITING: "on its way out, its script being over",
}


def seconds(duration_s: float) -> str:
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    return f"{duration_s:.0f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def place(report: RankReport, of_several: bool = False) -> str:
    if report.phase is RankPhase.SECTION:
        return f'in the section "{report.section}"'
    return _PLACES[report.phase].replace(" its ", " their ") if of_several else _PLACES[report.phase]


def state(report: RankReport) -> str:
    """What the rank's process does, as far as that explains the stall."""
    match report.process:
        case "t":
            return "held by a debugger"
        case "T":
            return "stopped by a signal (SIGSTOP or the like)"
        case "F":
            return "frozen by its cgroup"
        case "D":
            return "in uninterruptible sleep" + (f" in {report.wchan}" if report.wchan else "")
    return "computing" if report.busy else "asleep: a lock, a wait or a sleep"


def doing(report: RankReport) -> str:
    """Where a rank is, for how long, and what its process does."""
    if not report.alive:
        return "has ended"
    if not report.known:
        return f"has not begun to train after {seconds(report.stalled_s)} ({state(report)})"
    if report.is_stopped:
        return f"is {state(report)} for {seconds(report.stalled_s)}, {place(report)}"
    return f"stands still for {seconds(report.stalled_s)} {place(report)} ({state(report)})"


def call(said: Collective, whole_world: bool = True) -> str:
    """A collective, for example "all_reduce #412 (1,048,576 x float32)"."""
    size = f" ({said.numel:,} x {said.dtype})" if said.dtype else ""
    where = "" if whole_world else f" of group {said.group}"
    if said.peer >= 0 and said.op != "broadcast":
        where += f" with rank {said.peer}"
    return f"{said.op} #{said.seq}{size}{where}"


def wait(numbers: Sequence[int]) -> str:
    return f"{ranks(numbers)} {'waits' if len(numbers) == 1 else 'wait'}"


def who_waits(waits: Waits, rank: int) -> str:
    awaited = _awaited_in(waits, rank)
    inside = waits.inside[awaited]
    longest = max(inside_s(waits.reports[r], awaited) for r in inside)
    whole = len(waits.members.get(awaited.group, ())) == len(waits.reports)
    text = f"{wait(inside)} for it in {call(waits.told[awaited], whole)} for {seconds(longest)}"
    if awaited.between is None and rank in waits.reports:
        group = next((g for g in waits.reports[rank].groups if g.name == awaited.group), None)
        text += f"; it came as far as #{group.entered}" if group is not None and group.entered else ""
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
    said = [f"rank {report.rank} {doing(report)}"]
    if report.known:
        said.append(f"step {report.step}")
    if report.calls:
        last = report.calls[-1]
        verb = "finished" if last.finished_s is not None else "entered"
        ago = last.entered_s if last.finished_s is None else last.finished_s
        said.append(f"{verb} {call(last)} {seconds(ago)} ago")
    if report.message:
        said.append(f'says "{report.message}"')
    return "; ".join(said)
