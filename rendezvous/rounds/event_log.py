"""The event log of a job, derived from what each event changed. Pure. For users: no decision depends on it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace

from rendezvous.diagnosing import goodput
from rendezvous.diagnosing.stragglers import in_words, no_longer
from rendezvous.rounds.policy import outcome_text
from rendezvous.rounds.snapshot import SnapshotUnreadable, unpacked
from rendezvous.values.cause_text import counted
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentLost,
    Event,
    NodeHealth,
    PhaseTimesReported,
)
from rendezvous.values.job_state import JobState, Phase, world_nodes
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import RestartTimes
from rendezvous.values.rank_time import CLASSES, JobTime, TimeSpent  # the codec reads these annotations
from rendezvous.values.rows import Decoder, RowEncoder, all_fields
from rendezvous.values.text_limits import Sentence
from rendezvous.values.types import Decision, FailureClass

# The figures of a job over time, for the charts of the page, also after its end. Pure.
#
# A point has sums since the start of the job: the time of all ranks by class (docs/goodput.md), the part of it in which
# collectives ran behind computation, and the steps that a rank has finished on average. The browser divides differences
# between points. So points can be left out without an error: a series that is full drops every second one, and then
# takes points half as often. It covers the whole job.
#
# Agents report at different moments. Steps and time come from the same reports, so their quotient is right at any time.

MOST_POINTS = 300


@dataclass(frozen=True, slots=True)
class TimePoint:
    at: float  # seconds since the epoch
    generation: int
    steps: float  # of a rank, in this generation
    time: JobTime


def point_of(at: float, state: JobState) -> TimePoint | None:
    """None: its ranks have not shown what they do."""
    time = state.outcome.time if state.outcome is not None else goodput.whole(state.time)
    if time is None:
        return None
    placements = state.world.placements if state.world is not None else ()
    ranks = goodput.ranks_of(state.time, [place.agent.node for place in placements])
    steps = sum(rank.steps for rank in ranks) / len(ranks) if ranks else 0.0
    spent = TimeSpent(*(round(getattr(time.spent, name), 3) for name in CLASSES))
    time = replace(time, spent=spent, hidden=round(time.hidden, 3))
    return TimePoint(round(at, 1), state.generation, round(steps, 2), time)


@dataclass(frozen=True, slots=True)
class Series:
    """The points of a job. Of a full one, points are `every` times as far apart as those that are offered."""

    points: tuple[TimePoint, ...] = ()
    every: int = 1
    skipped: int = 0

    def offered(self, point: TimePoint, is_last: bool = False) -> Series:
        last = self.points[-1] if self.points else None
        if last is not None and last.time.spent == point.time.spent and last.generation == point.generation:
            return self
        is_near = last is not None and last.generation == point.generation and not is_last
        if is_near and self.skipped + 1 < self.every:
            return Series(self.points, self.every, self.skipped + 1)
        points, every = (*self.points, point), self.every
        if len(points) > MOST_POINTS:
            points, every = points[::2], every * 2
        return Series(points, every)


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An entry of the journal. The service sets `seq` and `at`."""

    seq: int
    at: float
    generation: int
    kind: str
    node: str
    text: Sentence


@dataclass(frozen=True, slots=True)
class EventLine:
    kind: str
    text: str
    node: str = ""


def lines(event: Event | None, before: JobState, after: JobState) -> Iterator[EventLine]:
    """The lines for one event. `event` is None if the state was read from the store."""
    if after is before or isinstance(event, AgentHeard):
        return
    if event is None:
        if after.spec is not None:
            where = f"{after.phase}, generation {after.generation}, {len(after.members)} members"
            yield EventLine("resumed", f"read from the store: {where}")
        return
    yield from _membership(event, before, after)
    if after.excluded is not before.excluded:
        yield from _exclusions(before, after)
    if after.decisions is not before.decisions:
        yield from (EventLine("decision", _decision_text(d)) for d in _new_decisions(before, after))
    agreed = before.spec is not None and after.spec is not None
    if agreed and (after.min_nodes, after.max_nodes) != (before.min_nodes, before.max_nodes):
        yield EventLine("resized", f"now {after.min_nodes} to {after.max_nodes} nodes")
    if before.phase is Phase.STOPPING and after.phase is not Phase.STOPPING:
        yield EventLine("stopped", "all ranks that had to end have ended")
    if after.generation != before.generation and after.world is not None:
        ranks, nodes = after.world.size, world_nodes(after)
        yield EventLine(
            "sealed", f"generation {after.generation}: {counted(ranks, 'rank')} on {counted(nodes, 'node')}"
        )
    if after.phase is not before.phase:
        yield from _phase(after)
    if after.refusal != before.refusal:
        yield EventLine("cannot-heal", f"the job cannot be healed in place: {after.refusal}")
    if isinstance(event, NodeHealth) and event.news:
        yield EventLine("health", f"{event.agent.node}: {event.news}", event.agent.node)
    if isinstance(event, PhaseTimesReported):
        yield from _straggler_lines(before, after)


def _membership(event: Event | None, before: JobState, after: JobState) -> Iterator[EventLine]:
    match event:
        case AgentJoined(agent) if agent.node in after.members and not _same(before, after, agent.node):
            yield EventLine("joined", f"{agent.node} joined ({_have_joined(len(after.members))})", agent.node)
        case AgentLeft(agent, reason) if agent.node not in after.members and agent.node in before.members:
            yield EventLine("left", f"{agent.node} left: {reason}", agent.node)
        case AgentLost(agent, reason) if agent.node not in after.members and agent.node in before.members:
            yield EventLine("lost", f"{agent.node} was lost: {reason}", agent.node)
        case _ if len(after.members) < len(before.members):
            for node in before.members:
                if node not in after.members:
                    yield EventLine("lost", _loss_text(node, after), node)


def _have_joined(nodes: int) -> str:
    return f"{counted(nodes, 'node')} {'has' if nodes == 1 else 'have'} joined"


def _loss_text(node: str, after: JobState) -> str:
    """Why the node was removed at a deadline: its lease expired, or it did not act in time."""
    lost = (c for c in after.causes.values() if c.node == node and c.failure is FailureClass.NODE_LOST)
    cause = next(lost, None)
    return f"node {node} was lost: no heartbeat" if cause is None else cause.reason


def _same(before: JobState, after: JobState, node: str) -> bool:
    known = before.members.get(node)
    return known is not None and known.agent == after.members[node].agent


def _exclusions(before: JobState, after: JobState) -> Iterator[EventLine]:
    for node, exclusion in after.excluded.items():
        if before.excluded.get(node) != exclusion:
            yield EventLine("excluded", f"{node} is excluded: {exclusion.reason}", node)
    for node in before.excluded:
        if node not in after.excluded:
            yield EventLine("readmitted", f"{node} is no longer excluded", node)


def _straggler_lines(before: JobState, after: JobState) -> Iterator[EventLine]:
    slow_ranks = before.straggler_state.slow_ranks
    for rank, slow_rank in after.straggler_state.named:
        if rank not in slow_ranks or not slow_ranks[rank].named:
            yield EventLine("straggler", in_words(rank, slow_rank.node, slow_rank.slowness), slow_rank.node)
    for rank, slow_rank in before.straggler_state.named:
        if rank not in after.straggler_state.slow_ranks:
            yield EventLine("keeps-up", no_longer(rank, slow_rank.node), slow_rank.node)


def _new_decisions(before: JobState, after: JobState) -> list[Decision]:
    """Compare the lists from the end: the oldest decisions are removed from a long list."""
    last = before.decisions[-1] if before.decisions else None
    new: list[Decision] = []
    for decision in reversed(after.decisions):
        if decision is last:
            break
        new.append(decision)
    return new[::-1]


def _decision_text(decision: Decision) -> str:
    return f"{decision.title}: {decision.reason}"


def _phase(after: JobState) -> Iterator[EventLine]:
    match after.phase:
        case Phase.RUNNING:
            yield EventLine("running", "the TCPStore is open; the ranks start")
        case Phase.STOPPING:
            yield EventLine("stopping", f"stop order sent to {counted(len(after.pending), 'node')}")
        case Phase.ENDED:
            assert after.outcome is not None
            yield EventLine("ended", outcome_text(after.outcome))
        case _:
            pass


# --- the past of a job ------------------------------------------------------------------------------
#
# What is left of a job beside its state: its events, the times of its restarts, when it ran, and the points of its
# charts. The service stores it with the state, and an agent writes it into a file. So all of it can be read after a
# restart of the service and after the end of the job. It is compressed JSON with its own schema, as a snapshot is, and
# always fits into the given number of bytes: every second point is left out first, then the oldest events.

_MAGIC = b"ddp-past 1\n"
_ROWS = RowEncoder(all_fields)
_LEVEL = 1
_FEWEST = 8  # events; with fewer, the times of restarts go
_FEWEST_POINTS = 50


@dataclass(frozen=True, slots=True)
class Past:
    began_at: float = 0.0  # times since the epoch
    ended_at: float = 0.0  # 0: it has not ended
    journal_id: str = ""
    notes: tuple[LoggedEvent, ...] = ()
    restart_times: tuple[RestartTimes, ...] = ()
    points: tuple[TimePoint, ...] = ()


def encode_past(past: Past, most_bytes: int) -> bytes:
    while len(data := _encoded(past)) > most_bytes:
        if len(past.points) > _FEWEST_POINTS:
            past = replace(past, points=past.points[::2])
        elif len(past.notes) > _FEWEST:
            past = replace(past, notes=past.notes[len(past.notes) // 2 :])
        else:
            past = replace(
                past, points=(), notes=past.notes[1:], restart_times=past.restart_times[-len(past.notes) :]
            )
        if not past.notes:
            return _encoded(Past(past.began_at, past.ended_at))
    return data


def _encoded(past: Past) -> bytes:
    document = {"schema": _ROWS.schema(Past), "past": _ROWS.encoder(Past)(past)}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return _MAGIC + zlib.compress(text.encode(), _LEVEL)


def decode_past(data: bytes) -> Past:
    """An empty one, if these bytes cannot be read: no decision depends on it."""
    try:
        document = unpacked(data, _MAGIC)
        schema = {name: tuple(columns) for name, columns in document["schema"].items()}
        past = Decoder(schema, all_fields).decoder(Past)(document["past"])
    except (SnapshotUnreadable, KeyError, TypeError, AttributeError, ValueError):
        return Past()
    assert isinstance(past, Past)
    return past
