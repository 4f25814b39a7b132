"""What happens to the job, as objects for `--on-event` and entry points (docs/events.md). Pure.

The agent of node rank 0 reports what concerns the whole job, so that it is reported once. If that node is lost, the
agent of node rank 1 does. Each agent reports what concerns its own node.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rendezvous.values.cause_text import cause_json, counted
from rendezvous.values.events import Ended, Notice, Stop
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import CLASSES
from rendezvous.values.types import DecisionKind, FailureClass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.exchange import AgentEvent, Finish, Supervision
    from rendezvous.values.types import Cause, Outcome

VERSION = 1


class EventKind(StrEnum):
    STARTED = "started"  # the ranks of the first generation start
    STOPPING = "stopping"  # the ranks are stopped, after a failure or for another reason
    RESTARTED = "restarted"  # the ranks of node rank 0 have finished their first step after a restart
    NOTICE = "notice"  # for example a rank that is slower than its peers
    NODE = "node"  # the health of this node has changed
    ENDED = "ended"  # the job is over
    LEFT = "left"  # this agent was stopped, or rejected: the job may continue without it


@dataclass(frozen=True, slots=True)
class JobEvent:
    kind: EventKind
    text: str
    details: Mapping[str, Any]


def of_step(event: AgentEvent, state: Supervision, started: bool) -> JobEvent | None:
    """The event for a step of the state machine, if this agent is the one that reports it.

    `started`: the ranks of this node have been started in this step.
    """
    mine = state.assignment
    if started and mine is not None and mine.node_rank == 0 and mine.generation == 1:
        start = "starts" if mine.world_size == 1 else "start"
        text = f"{counted(mine.world_size, 'rank')} {start} on {counted(mine.n_nodes, 'node')}"
        return JobEvent(EventKind.STARTED, text, {})
    match event:
        case Stop(_, decision) if _reports(state, decision.cause) and decision.kind is not DecisionKind.FAIL:
            details = {"decision": decision.title, "cause": decision.cause and cause_json(decision.cause)}
            # What follows a failure is decided again when all ranks have stopped.
            failed = None if decision.cause is None else _of_cause(decision.cause)
            return JobEvent(EventKind.STOPPING, failed or decision.reason, details)
        case Notice(_, text) if _reports(state, None):
            return JobEvent(EventKind.NOTICE, text, {})
        case Ended(outcome) if _reports(state, outcome.first_cause):
            return JobEvent(EventKind.ENDED, _text_of(outcome), _ending(outcome))
        case _:
            return None


def of_finish(finish: Finish) -> JobEvent | None:
    """The event for an agent that ends without an outcome of the job."""
    if finish.outcome is not None:
        return None
    return JobEvent(EventKind.LEFT, finish.reason, {"exit_code": finish.exit_code})


def _reports(state: Supervision, cause: Cause | None) -> bool:
    mine = state.assignment
    if mine is None:
        return False
    first_is_lost = (
        cause is not None and cause.failure is FailureClass.NODE_LOST and cause.node == mine.store_node
    )
    return mine.node_rank == (1 if first_is_lost else 0)


def as_object(event: JobEvent, state: Supervision | None, job: str, at: str) -> dict[str, Any]:
    """`at`: the time as text, in UTC."""
    mine = state.assignment if state is not None else None
    return {
        "version": VERSION,
        "event": str(event.kind),
        "time": at,
        "job": job,
        "node": state.agent.node if state is not None else "",
        "generation": mine.generation if mine is not None else 0,
        "ranks": mine.world_size if mine is not None else 0,
        "restarts": mine.restart_count if mine is not None else 0,
        "text": event.text,
        **event.details,
    }


def _text_of(outcome: Outcome) -> str:
    if outcome.succeeded or outcome.first_cause is None:
        return outcome.reason
    return f"{_of_cause(outcome.first_cause)}; {outcome.reason}"


def _of_cause(cause: Cause) -> str:
    return f"rank {cause.rank} on {cause.node}: {cause.reason}"


def _ending(outcome: Outcome) -> dict[str, Any]:
    spent = outcome.time.spent if outcome.time is not None else None
    return {
        "succeeded": outcome.succeeded,
        "exit_code": outcome.exit_code,
        "cause": outcome.first_cause and cause_json(outcome.first_cause),
        "goodput": None if spent is None else round(spent.goodput, 6),
        "seconds": None if spent is None else {name: round(getattr(spent, name), 3) for name in CLASSES},
    }
