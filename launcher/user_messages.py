"""Prints messages about the agent's events on the terminal, each message once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.exchange import CheckpointSignal, Isolated, StopRequested, StoreReached
from launcher.output.lines import printable
from launcher.supervised import Phase
from rendezvous.values.events import Assigned, CheckpointRequested, Notice, Stop, Waiting
from rendezvous.values.types import DecisionKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.exchange import AgentEvent
    from launcher.settings.spec import LaunchSpec
    from launcher.supervised import Supervision


class UserMessages:
    def __init__(self, spec: LaunchSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say_line = spec, say
        self._last_reason = self._last_waiting = self._last_notice = ""
        self.learned = ""  # what the next ranks need not import

    def say(self, text: str) -> None:
        self._say_line(f"ddp-launch: {printable(text)}")

    def report(self, event: AgentEvent, state: Supervision, before: Phase) -> None:
        """`state` is the state after the event, `before` the phase before it."""
        match event:
            case Stop(_, decision) if before is Phase.RUNNING and decision.kind is not DecisionKind.FAIL:
                self._report_reason(decision.reason)
            case Stop(_, decision) if before is Phase.RUNNING and decision.is_interrupt:
                self.say(f"{decision.reason}: stopping the ranks (up to {self._spec.shutdown_timeout_s:g} s)")
            case Assigned(assignment) if state.assignment == assignment:
                self._report_reason(assignment.reason)  # which names the first of several causes
            case StopRequested(_, name) if before is Phase.RUNNING:
                grace = self._spec.shutdown_timeout_s
                self.say(f"{name}: stopping the ranks (up to {grace:g} s; repeat the signal to kill at once)")
            case Waiting(reason, stands_by=True) if reason != self._last_waiting:
                self._last_waiting = reason
                self.say(f"{state.agent.node}: {reason}")
            case Notice(_, text) if text != self._last_notice:  # a rejected node may try again and again
                self._last_notice = text
                self.say(text)
            case StoreReached(_, problem) if problem:
                self.say(problem)
            case CheckpointRequested(_, reason) if before is Phase.RUNNING:
                self.say(f"the rendezvous service requests a checkpoint from the ranks: {reason}")
            case CheckpointSignal(name) if before is Phase.RUNNING:
                grace = self._spec.checkpoint_grace_s
                self.say(f"{name}: requesting a checkpoint from the ranks (up to {grace:g} s)")
            case Isolated(reason) if before is Phase.RUNNING:
                self.say(f"stopping the ranks of this node: {reason}")
            case _:
                pass

    def report_shared_id(self) -> None:
        """Say which job this node joins, if the ID was not given."""
        if self._spec.id_may_be_shared:
            self.say(
                f"this node joins the job {self._spec.run_id}, named after the user and the script. If you run this "
                "script several times at once on this rendezvous, give each job its own --rdzv-id."
            )

    def report_learned(self) -> None:
        """Report what the ranks that start now need not import."""
        if self.learned:
            self.say(self.learned)
            self.learned = ""

    def _report_reason(self, reason: str) -> None:
        if reason and reason != self._last_reason:
            self._last_reason = reason
            self.say(reason)
