"""The transition table at the head of launcher/supervision.py says what `step` does, of every fact in every phase.

All states that a node of two ranks can reach are enumerated, with every fact of its own generation, of the one before
and of the one after. What follows is compared with the table, both ways.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import get_args

from launcher import exchange, supervision
from launcher.exchange import (
    AgentEvent,
    AgentPhase,
    CannotHeal,
    CheckpointOver,
    CheckpointSignal,
    CommunicationFailed,
    ConditionMet,
    GpusFound,
    Grace,
    GraceOver,
    Inspected,
    Isolated,
    LastInspected,
    NodePrepared,
    RankEnded,
    RankHeals,
    RankParked,
    StacksTaken,
    StallDetected,
    StartFailed,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    StoreReached,
    Supervision,
    Swept,
    ZygoteReplaced,
)
from rendezvous.values.events import (
    Accused,
    AgentJoined,
    Assigned,
    CheckpointRequested,
    Ended,
    Examine,
    Notice,
    Refused,
    Stop,
    StoreAt,
    Waiting,
)
from rendezvous.values.rank_view import RankReport
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    StoreAddress,
)

AGENT = AgentId("a", "1")
STORE = StoreAddress("a", 29500)
CAUSE = Cause("a", 0, 0, FailureClass.CONSEQUENCE, "exit code 5", 5)
TERM = StopRequested(15, "SIGTERM")
_DEPTH = 4

Cells = dict[tuple[str, str], set[str]]


def facts() -> list[AgentEvent]:
    found: list[AgentEvent] = [
        Waiting("for others", 1, 2),
        Waiting("the job runs without this node", 2, 2, stands_by=True),
        Refused("no", 77),
        Refused("come back", 75, retryable=True),
        Ended(Outcome(False, "enough", 5, CAUSE)),
        TERM,
        StopRequested(2, "SIGINT"),
        CheckpointSignal("SIGUSR1", TERM),
        CheckpointSignal("SIGUSR1", None),
        Isolated("cut off"),
        ZygoteReplaced("it was lost", 137),
        StartFailed("no rank can be started"),
        GpusFound(),
    ]
    for generation in (1, 2):
        for node_rank in (0, 1):
            mine = Assignment(generation, node_rank, 2, 2 * node_rank, 2, 4, "default", 0, 2, 0, 3, "a")
            found.append(Assigned(mine))
            found.append(Assigned(replace(mine, in_place=True)))
            found.append(Assigned(replace(mine, check_first=True)))
        found += [
            NodePrepared(generation),
            StoreAt(generation, STORE),
            StoreListens(generation, STORE),
            StoreFailed(generation, "taken"),
            StoreLost(generation, "killed"),
        ]
        found += [StoreReached(generation), StoreReached(generation, "no route")]
        found += [RankEnded(generation, 0, None), RankEnded(generation, 1, CAUSE), Swept(generation)]
        found += [
            RankHeals(generation, 0, True),
            RankHeals(generation, 1, True),
            RankHeals(generation, 1, False),
        ]
        found += [
            RankParked(generation, 0),
            RankParked(generation, 1),
            CannotHeal(generation, 0, "it must not"),
        ]
        found += [GraceOver(generation, kind) for kind in Grace]
        found += [CheckpointRequested(generation, "growth"), CheckpointOver(generation, taken=True)]
        found += [Examine(generation), Accused(generation, CAUSE), StallDetected(generation)]
        found += [
            Inspected(generation, ()),
            LastInspected(generation, (RankReport(0),)),
            StacksTaken(generation, CAUSE),
        ]
        found += [
            CommunicationFailed(generation, CAUSE),
            ConditionMet(generation, CAUSE),
            Notice(generation, "news"),
        ]
        found += [
            Stop(generation, Decision(kind, "so", generation, CAUSE))
            for kind in (DecisionKind.RESTART, DecisionKind.GROW)
        ]
        in_place = Decision(DecisionKind.RESTART, "so", generation, CAUSE, in_place=True)
        found.append(Stop(generation, in_place))
    return found


def _starts() -> list[Supervision]:
    """A new agent; one whose ranks heal; and one whose ranks are parked, and wait for the next generation."""
    join = AgentJoined(AGENT, JobSpec("job", 2, 2), NodeFacts("a", "a.lan", 1))
    mine = Assignment(1, 0, 2, 0, 2, 4, "default", 0, 2, 0, 3, "a")
    in_place = Decision(DecisionKind.RESTART, "so", 1, CAUSE, in_place=True)
    starts = [Supervision(AGENT, join=join)]
    for story in (
        (Assigned(mine), StoreAt(1, STORE), RankHeals(1, 0, True), RankHeals(1, 1, True)),
        (Stop(1, in_place), RankParked(1, 0), RankParked(1, 1), Swept(1)),
    ):
        state = starts[-1]
        for fact in story:
            state, _ = supervision.step(state, fact)
        starts.append(state)
    assert [state.phase for state in starts] == [AgentPhase.JOINING, AgentPhase.RUNNING, AgentPhase.JOINING]
    assert starts[-1].parked == (0, 1)
    return starts


@cache
def done_by_step() -> Cells:
    """(fact, phase) -> what may follow: actions, "noted" for a change without any, "-> phase"."""
    starts = _starts()
    seen, frontier, cells, every = set(starts), starts, defaultdict(set), facts()
    for _ in range(_DEPTH):
        reached: list[Supervision] = []
        for state in frontier:
            for fact in every:
                after, actions = supervision.step(state, fact)
                cells[type(fact).__name__, str(state.phase)] |= _in_words(state, after, actions)
                if after not in seen:
                    seen.add(after)
                    reached.append(after)
        frontier = reached
    return cells


def _in_words(before: Supervision, after: Supervision, actions: tuple[exchange.Action, ...]) -> set[str]:
    words = {type(action).__name__ for action in actions if not isinstance(action, exchange.Send)}
    words |= {type(action.message).__name__ for action in actions if isinstance(action, exchange.Send)}
    if after.phase is not before.phase:
        words.add(f">{after.phase}")
    if after != before and not words:
        words.add("noted")
    return words


def table() -> Cells:
    rows = re.findall(
        r"^  \| (\w+) +\| (.*?) +\| (.*?) +\| (.*?) +\|$", supervision.__doc__ or "", re.MULTILINE
    )
    groups = dict(re.findall(r"^    ([A-Z]+): (.+)$", supervision.__doc__ or "", re.MULTILINE))
    cells: Cells = {}
    for fact, *columns in rows[1:]:  # the first one names the columns
        for phase, cell in zip(
            (AgentPhase.JOINING, AgentPhase.RUNNING, AgentPhase.STOPPING), columns, strict=True
        ):
            words = [groups.get(word, word) for word in cell.split() if word != "-"]
            cells[fact, str(phase)] = set(" ".join(words).split())
    return cells


def test_the_table_covers_every_fact() -> None:
    assert {fact for fact, _ in table()} == {each.__name__ for each in get_args(AgentEvent)}
    assert {type(fact) for fact in facts()} == set(get_args(AgentEvent)), "a fact that is not tried"


def test_the_table_says_what_step_does() -> None:
    done, said = done_by_step(), table()
    wrong = {cell: (words, done[cell]) for cell, words in said.items() if words != done[cell]}
    assert not wrong, "(fact, phase): (the table, what step does)"


def test_nothing_follows_in_done() -> None:
    assert not any(words for (_, phase), words in done_by_step().items() if phase == AgentPhase.DONE)
