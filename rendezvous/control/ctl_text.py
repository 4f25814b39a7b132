"""The text output of ddpctl."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten
from typing import Any

from rendezvous.codec import decode
from rendezvous.control.formats import as_dict
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.cause_text import code_of_cause, code_of_outcome
from rendezvous.values.durations import short_duration
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import LogPiece, LogStream
from rendezvous.values.rank_time import CLASSES, JobTime, TimeSpent, in_words
from rendezvous.values.types import Cause, Decision, DecisionKind, Outcome

# Pieces of the ranks' output as lines for a terminal or a program.

# On a terminal, colours are kept. All other escape sequences and control characters could control the terminal.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-?]*m)")
_COLORS = re.compile(r"\x1b\[[0-?]*m")


@dataclass(frozen=True, slots=True)
class LogLine:
    at: float
    node: str
    generation: int
    rank: int
    stream: LogStream
    text: str


def lines_of(pieces: Iterable[tuple[str, LogPiece]]) -> Iterator[LogLine]:
    """The lines of pieces with their nodes, in the order of time; those of one stream stay in order."""
    for node, piece in sorted(pieces, key=lambda each: each[1].at):
        rank, stream = piece.rank, piece.stream
        if piece.lost:
            gone = f"[{piece.lost} bytes are gone: the log file of this rank has a size limit]"
            yield LogLine(piece.at, node, piece.generation, rank, stream, gone)
        data = piece.data[:-1] if piece.data.endswith(b"\n") else piece.data
        for text in data.split(b"\n"):
            yield LogLine(piece.at, node, piece.generation, rank, stream, text.decode(errors="replace"))


def on_terminal(text: str, *, color: bool) -> str:
    """The line as a terminal would show it at last: what a carriage return has overwritten is left out."""
    shown = text.rstrip("\r").rpartition("\r")[2]
    shown = _CONTROLS.sub("", _ESCAPES.sub("", shown))
    if not color:
        return _COLORS.sub("", shown)
    return f"{shown}\x1b[0m" if "\x1b" in shown else shown


def prefix(line: LogLine) -> str:
    return f"[{line.node}:{line.rank}] "


def line_as_dict(line: LogLine) -> dict[str, Any]:
    return {
        "at": line.at,
        "node": line.node,
        "generation": line.generation,
        "rank": line.rank,
        "stream": str(line.stream),
        "text": line.text,
    }


_NAMED = 8


def job_table(jobs: Sequence[Any], now: float | None = None) -> str:
    """`now`: since the epoch; only tests set it. Columns about the end are left out if no job has ended."""
    if not jobs:
        return "no jobs"
    ended = any(job.phase == pb.PHASE_ENDED for job in jobs)
    of_ended = ("ENDED", "GOODPUT") if ended else ()
    head = ("JOB", "PHASE", "TOOK", *of_ended, "GENERATION", "NODES", "RANKS", "RESTARTS", "HEALS", "WHY")
    return _table(head, (_job_row(job, ended, time.time() if now is None else now) for job in jobs))


def _job_row(job: Any, ended: bool, now: float) -> tuple[str, ...]:
    goodput = f"{100 * job.goodput:.1f}%" if job.HasField("goodput") else "-"
    of_ended = (time.strftime("%m-%d %H:%M", time.localtime(job.ended_at)) if job.ended_at else "-", goodput)
    return (
        _printable(job.job_id),
        phase_of(job),
        _took(job, now),
        *(of_ended if ended else ()),
        str(job.generation),
        f"{job.nodes or job.members}/{_range(job)}",
        str(job.world_size),
        str(job.restarts),
        str(job.heals),
        shorten(_printable(job.reason), 100, placeholder=" ..."),
    )


def _took(job: Any, now: float) -> str:
    until = job.ended_at or (0.0 if job.phase == pb.PHASE_ENDED else now)
    return short_duration(until - job.began_at) if job.began_at and until > job.began_at else "-"


def finished_hint(finished: int) -> str:
    """What a list of unfinished jobs leaves out."""
    have = "job has" if finished == 1 else "jobs have"
    return f"{finished} {have} ended: `ddpctl list --all`" if finished else ""


def phase_of(job: Any) -> str:
    if job.phase == pb.PHASE_ENDED:
        return "succeeded" if job.succeeded else "failed"
    return pb.Phase.Name(job.phase).removeprefix("PHASE_").lower()


def _range(job: Any) -> str:
    return str(job.max_nodes) if job.min_nodes == job.max_nodes else f"{job.min_nodes}:{job.max_nodes}"


def job_text(job: Any) -> str:
    parts = [job_table([job.summary])]
    if job.nodes:
        parts.append(
            _table(
                ("NODE", "RANK", "RANKS", "ADDRESS", "HEARTBEAT", "STATE"),
                (_node_row(node, job.summary) for node in job.nodes),
            )
        )
    problems = [f"  {_printable(n.node)}: {_printable(text)}" for n in job.nodes for text in n.health]
    if problems:
        parts.append("\n".join(["health:", *problems]))
    if placed := _placement(job.nodes):
        parts.append("\n".join(["topology:", *(f"  {line}" for line in placed)]))
    if timed := _time(job):
        parts.append("\n".join(["time:", *(f"  {line}" for line in timed)]))
    if job.decisions:
        parts.append("\n".join(["decisions:", *(f"  {_decision(d)}" for d in job.decisions)]))
    if job.HasField("outcome") and job.outcome.HasField("first_cause"):
        code = code_of_cause(decode(Cause, job.outcome.first_cause))
        parts.append(f"first cause: {_cause(job.outcome.first_cause)} [{code}]")
    return "\n\n".join(parts)


def _placement(nodes: Iterable[Any]) -> list[str]:
    """Where nodes are, and what is in them. Nodes with equal hardware share a line."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        if node.hardware:
            alike.setdefault(_printable(node.hardware), []).append(_printable(node.node))
    lines = [f"{_printable(node.node)} is in {_printable(node.block)}" for node in nodes if node.block]
    return lines + [f"{_some(names)}: {hardware}" for hardware, names in alike.items()]


def _time(job: Any) -> list[str]:
    """What the time of all ranks was spent on, and the rank with the smallest share of steps."""
    if not job.HasField("time"):
        return []
    lines = [in_words(JobTime(job.time.ranks, _spent(job.time)))]
    ranks = [(_spent(rank).goodput, rank.rank) for rank in job.ranks]
    if len(ranks) > 1:
        least, rank = min(ranks)
        lines.append(f"rank {rank} has the lowest goodput: {100 * least:.1f} %")
    return [line for line in lines if line]


def _spent(time: Any) -> TimeSpent:
    return TimeSpent(*(getattr(time.spent, name) for name in CLASSES))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _node_row(node: Any, summary: Any) -> tuple[str, ...]:
    placed = node.HasField("node_rank")
    first = node.rank_offset
    if node.excluded:
        state = f"excluded: {_printable(node.excluded)}"
    else:
        state = "assigned" if placed else "standby"
    return (
        _printable(node.node),
        str(node.node_rank) if placed else "-",
        f"{first}-{first + node.nproc - 1}" if placed else str(node.nproc),
        _printable(node.address) or "-",
        "-" if summary.phase == pb.PHASE_ENDED else f"{node.heard_s:.1f} s ago" if node.present else "absent",
        state,
    )


def _decision(decision: Any) -> str:
    kind = DecisionKind[pb.DecisionKind.Name(decision.kind).removeprefix("DECISION_KIND_")]
    title = Decision(kind, "", decision.generation, in_place=decision.in_place).title
    return f"generation {decision.generation}: {title}: {_printable(decision.reason)}"


def _cause(cause: Any) -> str:
    unsure = "cause uncertain: " if cause.HasField("doubt") else ""
    reason = f"{unsure}{_printable(cause.reason)} (exit code {cause.exit_code})"
    return f"rank {cause.rank} on {_printable(cause.node)}: {reason}"


def event_line(note: Any) -> str:
    is_today = time.localtime(note.at)[:3] == time.localtime()[:3]
    at = time.strftime("%H:%M:%S" if is_today else "%m-%d %H:%M:%S", time.localtime(note.at))
    return f"{at}  g{note.generation:<3} {note.kind:<10} {_printable(note.text)}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in lines
    )


def named(nodes: Iterable[str]) -> str:
    return ", ".join(map(_printable, nodes)) or "none"


def _printable(text: str) -> str:
    """Replace control characters: names and reasons come from other machines and must not control this terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which may contain tabs."""
    return "\n".join(_printable(line.expandtabs()) for line in text.split("\n"))


# --- a job as JSON or YAML: the message of the service, with the error codes of its failures --------


def job_dict(job: Any) -> dict[str, Any]:
    found = as_dict(job)
    for shown, failure in zip(found.get("failures", ()), job.failures, strict=True):
        shown["cause"] = cause_dict(failure.cause)
    if job.HasField("outcome"):
        found["outcome"]["code"] = code_of_outcome(decode(Outcome, job.outcome))
    return found


def cause_dict(cause: Any) -> dict[str, Any]:
    return {**as_dict(cause), "code": code_of_cause(decode(Cause, cause))}
