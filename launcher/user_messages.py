"""Prints the agent's facts on the terminal, each message once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.exchange import CheckpointSignal, Isolated, StopRequested, StoreReached
from launcher.output.lines import printable
from launcher.supervised import Phase
from rendezvous.values.events import Assigned, CheckpointRequested, Notice, Stop, Waiting
from rendezvous.values.types import DecisionKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.exchange import Fact
    from launcher.settings.spec import LaunchSpec
    from launcher.supervised import Supervision


class UserMessages:
    def __init__(self, spec: LaunchSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say_line = spec, say
        self._said = self._said_waiting = self._said_notice = ""

    def say(self, text: str) -> None:
        self._say_line(f"ddp-launch: {printable(text)}")

    def report(self, fact: Fact, state: Supervision, before: Phase) -> None:
        """`state`: after the fact; `before`: the phase it was in."""
        match fact:
            case Stop(_, decision) if before is Phase.RUNNING and decision.kind is not DecisionKind.FAIL:
                self._say_reason(decision.reason)
            case Assigned(assignment) if state.assignment == assignment:
                self._say_reason(assignment.reason)  # now the first of several causes is known
            case StopRequested(_, name) if before is Phase.RUNNING:
                grace = self._spec.shutdown_timeout_s
                self.say(f"{name}: stopping the ranks (up to {grace:g} s; repeat the signal to kill at once)")
            case Waiting(reason, stands_by=True) if reason != self._said_waiting:
                self._said_waiting = reason
                self.say(f"{state.agent.node}: {reason}")
            case Notice(_, text) if text != self._said_notice:  # a rejected node may try again and again
                self._said_notice = text
                self.say(text)
            case StoreReached(_, problem) if problem:
                self.say(problem)
            case CheckpointRequested(_, reason) if before is Phase.RUNNING:
                self.say(f"a checkpoint is requested: {reason}")
            case CheckpointSignal(name) if before is Phase.RUNNING:
                grace = self._spec.checkpoint_grace_s
                self.say(f"{name}: asking the ranks for a checkpoint (up to {grace:g} s)")
            case Isolated(reason) if before is Phase.RUNNING:
                self.say(f"stopping the ranks of this node: {reason}")
            case _:
                pass

    def _say_reason(self, reason: str) -> None:
        if reason and reason != self._said:
            self._said = reason
            self.say(reason)
