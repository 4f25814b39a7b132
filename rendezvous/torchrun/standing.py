"""The state of a node under torch's agent, and the messages that it sends. Pure.

torch's agent does not answer questions and reports little. So the standing keeps what both sides need: the generation
that runs (`running`), and what the service has sent since.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from rendezvous.values.events import (
    Accused,
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    Ended,
    Examine,
    Examined,
    Notice,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    Waiting,
)
from rendezvous.values.types import AgentId, Assignment, Cause, FailureClass, Outcome, StoreAddress

if TYPE_CHECKING:
    from rendezvous.values.events import FromAgent, ToAgent

Said = tuple["Standing", tuple["FromAgent", ...]]


@dataclass(frozen=True, slots=True)
class Standing:
    agent: AgentId
    joining: AgentJoined
    joined: bool = False
    running: Assignment | None = None  # given to torch's agent, whose ranks may be alive
    assigned: Assignment | None = None  # sealed, and not given to torch's agent yet
    store: StoreAddress | None = None  # of `assigned`
    stop: Stop | None = None  # of `running`
    cast_out: bool = False  # the job continued without this node, which may join again
    refused: Refused | None = None
    outcome: Outcome | None = None
    waits_for: str = ""  # in the service's words

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.refused is not None

    @property
    def must_come_again(self) -> bool:
        """Whether the service wants the running ranks to stop, even if torch's agent does not."""
        if self.running is None:
            return False
        ended_badly = self.outcome is not None and not self.outcome.succeeded
        told = self.stop is not None or self.assigned is not None
        return told or self.cast_out or self.refused is not None or ended_badly


# --- messages from the service -----------------------------------------------------------------------


def hear(standing: Standing, message: ToAgent) -> Said:
    match message:
        case Waiting(reason):
            return replace(standing, waits_for=reason), ()
        case Assigned(assignment):
            return _assigned(standing, assignment), ()
        case StoreAt(generation, store):
            mine = standing.assigned is not None and standing.assigned.generation == generation
            return (replace(standing, store=store) if mine else standing), ()
        case Stop():
            return _stopped(standing, message)
        case Refused() if message.retryable:
            gone = replace(standing, assigned=None, store=None, joined=False)
            return (gone, ()) if gone.running is None else (replace(gone, cast_out=True), ())
        case Refused():
            return replace(standing, refused=message), ()
        case Ended(outcome):
            return replace(standing, outcome=outcome), ()
        case Examine(generation):  # the node cannot see torch's ranks; answer at once
            return standing, (Examined(standing.agent, generation, ()),)
        case Accused() | Notice():
            return standing, ()
        case CheckpointRequested():  # torch's agent cannot forward this; the world grows at a restart
            return standing, ()
        case _:
            assert_never(message)


def _assigned(standing: Standing, assignment: Assignment) -> Standing:
    """Store a new assignment. A resumed session receives known assignments again."""
    known = max((a.generation for a in (standing.running, standing.assigned) if a is not None), default=0)
    if assignment.generation <= known:
        return standing
    return replace(standing, assigned=assignment, store=None)


def _stopped(standing: Standing, order: Stop) -> Said:
    if standing.running is not None and standing.running.generation == order.generation:
        return replace(standing, stop=order), ()
    if standing.assigned is not None and standing.assigned.generation == order.generation:
        standing = replace(standing, assigned=None, store=None)
    # That generation does not run here: it broke before torch's agent got it, or is already reaped.
    return standing, (AgentStopped(standing.agent, order.generation),)


# --- calls of torch's agent --------------------------------------------------------------------------


def come(standing: Standing) -> Said:
    """`next_rendezvous`: torch's agent has reaped all earlier ranks."""
    standing, said = _reaped(standing)
    if standing.over or standing.joined:
        return standing, said
    return replace(standing, joined=True), (*said, standing.joining)


def _reaped(standing: Standing) -> Said:
    ran = standing.running
    if ran is None:
        return standing, ()
    stopped = AgentStopped(standing.agent, ran.generation)
    said: tuple[FromAgent, ...] = (stopped,)
    if not standing.must_come_again:
        said = (RankFailed(standing.agent, ran.generation, _wish(standing.agent, ran)), stopped)
    elif standing.stop is None:
        said = ()
    return replace(standing, running=None, stop=None, cast_out=False), said


def _wish(agent: AgentId, ran: Assignment) -> Cause:
    """The cause for a wish to restart. Any better known cause comes first: another node may have failed first."""
    reason = "torchrun starts its ranks anew after a failure; its log there says which failed, and why"
    return Cause(agent.node, ran.rank_offset, 0, FailureClass.CONSEQUENCE, reason, 1)


def hand_out(standing: Standing, assignment: Assignment) -> Said:
    """Give the assignment to torch's agent, unless that world broke meanwhile."""
    if standing.assigned != assignment or standing.over:
        return standing, ()
    return replace(standing, running=assignment, assigned=None, store=None, stop=None), ()


def finish(standing: Standing) -> Said:
    """torch's agent has finished, and all its ranks succeeded."""
    if standing.running is None or standing.must_come_again:
        return leave(standing, "its ranks had finished, and torchrun does not start them again")
    return standing, (RanksFinished(standing.agent, standing.running.generation),)


def give_up(standing: Standing, cause: Cause) -> Said:
    """torch's agent does not restart any more. By the rules of the job, the class of `cause` fails the job."""
    if standing.running is None or standing.over or standing.cast_out:
        return leave(standing, cause.reason)
    agent, ran = standing.agent, standing.running
    cause = replace(cause, node=agent.node, rank=ran.rank_offset)
    return standing, (RankFailed(agent, ran.generation, cause), AgentStopped(agent, ran.generation))


def leave(standing: Standing, reason: str) -> Said:
    if standing.over or not standing.joined:
        return standing, ()
    return standing, (AgentLeft(standing.agent, reason),)
