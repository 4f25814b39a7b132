"""The state of a node under torch's agent, and the messages that it sends. Pure.

torch's agent cannot be queried, and it reports little. So the node state contains what both sides need: the generation
that runs (`running`), and what the service has sent since then.
"""

from __future__ import annotations

from dataclasses import replace
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
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import AgentId, Assignment, Cause, FailureClass, Outcome, StoreAddress

if TYPE_CHECKING:
    from rendezvous.values.events import FromAgent, ToAgent

Transition = tuple["NodeState", tuple["FromAgent", ...]]


@dataclass(frozen=True, slots=True)
class NodeState:
    agent: AgentId
    joining: AgentJoined
    joined: bool = False
    running: Assignment | None = None  # given to torch's agent, whose ranks may be alive
    assigned: Assignment | None = None  # sealed, and not given to torch's agent yet
    store: StoreAddress | None = None  # of `assigned`
    stop: Stop | None = None  # of `running`
    dropped: bool = False  # the job continued without this node; the node may join again
    refused: Refused | None = None
    outcome: Outcome | None = None
    waits_for: str = ""  # the reason that the service sends

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.refused is not None

    @property
    def must_rejoin(self) -> bool:
        """Whether the running ranks must stop, although torch's agent itself has no reason to stop them."""
        if self.running is None:
            return False
        ended_badly = self.outcome is not None and not self.outcome.succeeded
        is_replaced = self.stop is not None or self.assigned is not None
        return is_replaced or self.dropped or self.refused is not None or ended_badly


# --- messages from the service -----------------------------------------------------------------------


def handle_message(node: NodeState, message: ToAgent) -> Transition:
    match message:
        case Waiting(reason):
            return replace(node, waits_for=reason), ()
        case Assigned(assignment):
            return _assigned(node, assignment), ()
        case StoreAt(generation, store):
            mine = node.assigned is not None and node.assigned.generation == generation
            return (replace(node, store=store) if mine else node), ()
        case Stop():
            return _stopped(node, message)
        case Refused() if message.retryable:
            gone = replace(node, assigned=None, store=None, joined=False)
            return (gone, ()) if gone.running is None else (replace(gone, dropped=True), ())
        case Refused():
            return replace(node, refused=message), ()
        case Ended(outcome):
            return replace(node, outcome=outcome), ()
        case Examine(generation):  # the node cannot see torch's ranks; answer at once
            return node, (Examined(node.agent, generation, ()),)
        case Accused() | Notice():
            return node, ()
        case CheckpointRequested():  # torch's agent cannot forward this; the world grows at a restart
            return node, ()
        case _:
            assert_never(message)


def _assigned(node: NodeState, assignment: Assignment) -> NodeState:
    """Store a new assignment. A resumed session receives known assignments again."""
    known = max((a.generation for a in (node.running, node.assigned) if a is not None), default=0)
    if assignment.generation <= known:
        return node
    return replace(node, assigned=assignment, store=None)


def _stopped(node: NodeState, order: Stop) -> Transition:
    if node.running is not None and node.running.generation == order.generation:
        return replace(node, stop=order), ()
    if node.assigned is not None and node.assigned.generation == order.generation:
        node = replace(node, assigned=None, store=None)
    # That generation does not run here: it ended before torch's agent got it, or its ranks are already reaped.
    return node, (AgentStopped(node.agent, order.generation),)


# --- calls of torch's agent --------------------------------------------------------------------------


def next_rendezvous(node: NodeState) -> Transition:
    """`next_rendezvous`: torch's agent has reaped all earlier ranks."""
    node, messages = _reaped(node)
    if node.over or node.joined:
        return node, messages
    return replace(node, joined=True), (*messages, node.joining)


def _reaped(node: NodeState) -> Transition:
    ran = node.running
    if ran is None:
        return node, ()
    stopped = AgentStopped(node.agent, ran.generation)
    messages: tuple[FromAgent, ...] = (stopped,)
    if not node.must_rejoin:
        messages = (RankFailed(node.agent, ran.generation, _restart_request(node.agent, ran)), stopped)
    elif node.stop is None:
        messages = ()
    return replace(node, running=None, stop=None, dropped=False), messages


def _restart_request(agent: AgentId, ran: Assignment) -> Cause:
    """The cause for a request to restart. A more specific cause of another node is preferred."""
    reason = "torchrun restarts its ranks after a failure; see the log of torchrun on that node"
    return Cause(agent.node, ran.rank_offset, 0, FailureClass.CONSEQUENCE, reason, 1)


def give_to_torch(node: NodeState, assignment: Assignment) -> Transition:
    """Give the assignment to torch's agent, unless that world has ended in the meantime."""
    if node.assigned != assignment or node.over:
        return node, ()
    return replace(node, running=assignment, assigned=None, store=None, stop=None), ()


def finish(node: NodeState) -> Transition:
    """torch's agent has finished, and all its ranks succeeded."""
    if node.running is None or node.must_rejoin:
        return leave(node, "all its ranks have finished, and torchrun does not start them again")
    return node, (RanksFinished(node.agent, node.running.generation),)


def fail_job(node: NodeState, cause: Cause) -> Transition:
    """torch's agent does not restart again. By the rules of `_job_spec`, a failure of this class ends the job."""
    if node.running is None or node.over or node.dropped:
        return leave(node, cause.reason)
    agent, ran = node.agent, node.running
    cause = replace(cause, node=agent.node, rank=ran.rank_offset)
    return node, (RankFailed(agent, ran.generation, cause), AgentStopped(agent, ran.generation))


def leave(node: NodeState, reason: str) -> Transition:
    if node.over or not node.joined:
        return node, ()
    return node, (AgentLeft(node.agent, reason),)
