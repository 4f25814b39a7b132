"""What happens in a simulated job, one line per step that changes something: who, what came in, what followed.

    2.51 service | RankFailed node0 g1 rank 0 exit-code | stopping g1 | Stop node0, Stop node1
    2.51 node1   | Stop g1 restart                      | stopping    | SignalRanks 15, StartGrace g1

The columns of a service are event, phase with generation, and messages to agents; those of a node are fact, phase, and
actions. Heartbeats, writes and deadlines that move are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.exchange import Finish, Grace, Send, SignalRanks
from rendezvous.values.events import AgentHeard, Persist, SetDeadline, Tell
from rendezvous.values.types import AgentId, Assignment, Cause, Decision, Outcome

if TYPE_CHECKING:
    from launcher.exchange import Action, AgentEvent, Supervision
    from rendezvous.service.owner import Transition
    from rendezvous.values.events import Event
    from rendezvous.values.job_state import JobState


class Transcript:
    def __init__(self) -> None:
        self._lines: list[tuple[float, str, str, str, str]] = []

    def take(self) -> list[str]:
        """The lines since the last time."""
        lines, self._lines = self._lines, []
        return [
            f"{at:7.2f} {who:<8}| {what} | {phase} | {then or '-'}" for at, who, what, phase, then in lines
        ]

    def service_stepped(self, at: float, before: JobState, event: Event, transition: Transition) -> None:
        told = [e for e in transition.effects if isinstance(e, Tell)]
        if isinstance(event, AgentHeard) and not told:
            return
        quiet = all(isinstance(e, Persist | SetDeadline) for e in transition.effects)
        after = transition.state
        if quiet and (after.phase, after.generation, len(after.pending)) == (
            before.phase,
            before.generation,
            len(before.pending),
        ):
            return
        then = ", ".join(f"{in_words(e.message)} -> {e.agent.node}" for e in told)
        self._lines.append((at, "service", in_words(event), f"{after.phase} g{after.generation}", then))

    def agent_stepped(
        self,
        at: float,
        node: str,
        before: Supervision,
        fact: AgentEvent,
        after: Supervision,
        actions: tuple[Action, ...],
    ) -> None:
        if after is not before or actions:
            then = ", ".join(_action(action) for action in actions)
            self._lines.append((at, node, in_words(fact), str(after.phase), then))

    def contact(self, at: float, node: str, held: bool) -> None:
        self._lines.append((at, node, f"contact {'held' if held else 'lost'}", "-", ""))


def _action(action: Action) -> str:
    match action:
        case Send(message):
            return f"send {in_words(message)}"
        case SignalRanks(signum, only):
            return f"SignalRanks {signum}" if only is None else f"SignalRanks {signum} to {list(only)}"
        case Finish(exit_code):
            return f"Finish {exit_code}"
        case _:
            return in_words(action)


def in_words(value: object) -> str:
    """The name of a message, fact or action, and those of its fields that matter to its reader."""
    fields = (_field(name, getattr(value, name)) for name in type(value).__slots__)
    return " ".join([type(value).__name__, *filter(None, fields)])


def _field(name: str, value: object) -> str:
    match value:
        case AgentId(node):
            return node
        case Cause(rank=rank, failure=failure):
            return f"rank {rank} {failure}"
        case Decision():
            return value.title
        case Outcome(exit_code=exit_code):
            return f"exit code {exit_code}"
        case Assignment(generation, node_rank, n_nodes, in_place=in_place):
            return f"g{generation} node {node_rank} of {n_nodes}{' in place' if in_place else ''}"
        case tuple() if name in ("parked", "kept", "local_ranks") and value:
            return f"{name.replace('_', ' ')} {list(value)}"
        case bool() if name == "ready":
            return "ready" if value else "not ready"
        case int() if name == "generation":
            return f"g{value}"
        case int() if name in ("local_rank", "exit_code", "signum"):
            return f"{name.replace('_', ' ')} {value}"
        case True if name in ("taken", "retryable", "ends_job"):
            return name.replace("_", " ")
        case Grace() if value is not Grace.FULL:
            return str(value)
        case str() if name == "problem" and value:
            return value
        case _:
            return ""
