"""Events for the user's programs: each is reported once, by the right node."""

from __future__ import annotations

import json

import pytest

from launcher.exchange import Finish, Supervision
from launcher.notify.notifier import EventKind, as_object, of_finish, of_step
from rendezvous.values.events import Ended, Notice, Stop, Waiting
from rendezvous.values.rank_time import JobTime, TimeSpent
from rendezvous.values.types import AgentId, Assignment, Cause, Decision, DecisionKind, FailureClass, Outcome

CAUSE = Cause("node1", 5, 1, FailureClass.USER_EXCEPTION, "ValueError: bad batch", 1, step=12)
LOST = Cause("node0", 0, 0, FailureClass.NODE_LOST, "node node0 was lost", 1)
WAITING = Waiting("waiting for 1 more node", 1, 2)


def state(node_rank: int, restarts: int = 0) -> Supervision:
    mine = Assignment(
        restarts + 1, node_rank, 2, 4 * node_rank, 4, 8, "default", 0, 8, restarts, 3, "h", "node0"
    )
    return Supervision(AgentId(f"node{node_rank}", "1"), assignment=mine)


def restart(cause: Cause | None) -> Stop:
    return Stop(1, Decision(DecisionKind.RESTART, "restarting", 1, cause))


@pytest.mark.parametrize(
    ("event", "reporter", "kind"),
    [
        (restart(CAUSE), 0, EventKind.STOPPING),
        (restart(None), 0, EventKind.STOPPING),
        (restart(LOST), 1, EventKind.STOPPING),
        (Notice(1, "rank 3 is slower than its peers"), 0, EventKind.NOTICE),
        (Ended(Outcome(True, "all ranks finished", 0)), 0, EventKind.ENDED),
        (Ended(Outcome(False, "no restarts left", 1, LOST)), 1, EventKind.ENDED),
    ],
)
def test_one_node_reports_what_concerns_the_job(event: object, reporter: int, kind: EventKind) -> None:
    told = [of_step(event, state(node_rank), False) for node_rank in range(3)]  # type: ignore[arg-type]
    assert [None if each is None else each.kind for each in told] == [
        kind if node_rank == reporter else None for node_rank in range(3)
    ]


def test_what_is_no_event() -> None:
    fail = Stop(1, Decision(DecisionKind.FAIL, "no restarts left", 1, CAUSE))
    for event in (fail, WAITING):  # that the job ends comes with its end
        assert of_step(event, state(0), False) is None
    assert (
        of_step(Ended(Outcome(True, "all ranks finished", 0)), Supervision(AgentId("a", "1")), False) is None
    )


def test_the_start_is_reported_once() -> None:
    told = [of_step(WAITING, state(rank, restarts), True) for rank in (0, 1) for restarts in (0, 1)]
    assert [each.text if each else None for each in told] == ["8 ranks start on 2 nodes", None, None, None]


def test_an_end_has_its_cause_and_the_time_of_the_job() -> None:
    spent = JobTime(8, TimeSpent(forward=30.0, idle=10.0))
    event = of_step(Ended(Outcome(False, "no restarts left", 1, CAUSE, time=spent)), state(0, 2), False)
    assert event is not None
    shown = json.loads(json.dumps(as_object(event, state(0, 2), "train", "2026-01-31T09:12:44Z")))
    assert {
        name: shown[name] for name in ("version", "event", "time", "job", "node", "generation", "ranks")
    } == {
        "version": 1,
        "event": "ended",
        "time": "2026-01-31T09:12:44Z",
        "job": "train",
        "node": "node0",
        "generation": 3,
        "ranks": 8,
    }
    assert shown["text"] == "rank 5 on node1: ValueError: bad batch; no restarts left"
    assert (shown["succeeded"], shown["exit_code"], shown["goodput"]) == (False, 1, 0.75)
    assert (shown["cause"]["rank"], shown["cause"]["class"], shown["cause"]["step"]) == (
        5,
        "user-exception",
        12,
    )
    assert sum(shown["seconds"].values()) == 40.0


def test_an_agent_that_was_stopped_says_so_itself() -> None:
    left = of_finish(Finish(130, "stopped by SIGINT"))
    assert left is not None
    assert as_object(left, None, "train", "")["exit_code"] == 130
    assert of_finish(Finish(0, "", Outcome(True, "all ranks finished", 0))) is None
