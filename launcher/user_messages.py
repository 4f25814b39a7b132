"""Prints messages about the agent's events on the terminal, each message once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.exchange import (
    CheckpointSignal,
    Grace,
    GraceOver,
    Isolated,
    Phase,
    RankEnded,
    StopRequested,
    StoreReached,
)
from launcher.output.lines import printable
from rendezvous.values.cause_text import ranks
from rendezvous.values.events import Assigned, CheckpointRequested, Notice, Stop, Waiting
from rendezvous.values.types import Cause, DecisionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from launcher.exchange import AgentEvent, Supervision
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.types import Decision


_SIGKILL = 9


class UserMessages:
    def __init__(self, spec: LaunchSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say_line = spec, say
        self._last_reason = self._last_waiting = self._last_notice = ""
        self._held = ""  # the reason of a stop, until it is certain that the job goes on
        self.learned = 0  # modules that the next ranks need not import

    def say(self, text: str) -> None:
        self._say_line(f"ddp-launch: {printable(text)}")

    def report(self, event: AgentEvent, state: Supervision, before: Phase) -> None:
        """`state` is the state after the event, `before` the phase before it."""
        match event:
            case Stop(_, decision) if before is Phase.RUNNING and decision.kind is not DecisionKind.FAIL:
                self._report_stop(decision)
            case Stop(_, decision) if before is Phase.RUNNING and decision.is_interrupt:
                self.say(f"{decision.reason}: stopping the ranks (up to {self._spec.shutdown_timeout_s:g} s)")
            case Assigned(assignment) if state.assignment == assignment:
                self._report_reason(assignment.reason)  # which names the first of several causes
            case StopRequested(_, name) if before is Phase.RUNNING:
                grace = self._spec.shutdown_timeout_s
                self.say(f"{name}: stopping the ranks (up to {grace:g} s; repeat the signal to kill at once)")
            case Waiting(stands_by=False) if self._held:  # for a replacement
                self._report_reason(self._held)
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
                self._report_paused(event, state, before)

    def _report_paused(self, event: AgentEvent, state: Supervision, before: Phase) -> None:
        """Report which ranks keep their processes, and which could not be paused."""
        if before is Phase.JOINING and state.phase is Phase.RUNNING and state.kept:
            self.say(_kept_text(state))
        match event:
            case GraceOver(kind=Grace.FULL) if state.in_place and state.stop_signal == _SIGKILL:
                who = ranks(_global(state, set(state.live) - set(state.parked)))
                timeout = f"{self._spec.shutdown_timeout_s:g} s (--shutdown-timeout)"
                self.say(
                    f"{who} did not leave its collective or native code within {timeout}, and was killed"
                )
            case RankEnded(_, _, Cause() as cause) if before is Phase.JOINING:
                self.say(
                    f"rank {cause.rank} ended while it was paused: {cause.reason}; it will be started anew"
                )
            case _:
                pass

    def report_debug(self) -> None:
        """Say which rank is debugged, and how."""
        debug = self._spec.debug
        if debug is not None:
            how = (
                f"waits for a debugger at {debug.address} before its script starts"
                if debug.address
                else "alone reads from the terminal, and breakpoint() does nothing in the other ranks"
            )
            self.say(
                f"--debug: rank {debug.rank} {how}. No rank is called hung, and collectives wait for a week."
            )

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
            self.say(
                f"the ranks start with {self.learned} modules of torch and ddp that the ranks before them "
                "have imported (--no-learn-imports turns this off)"
            )
            self.learned = 0

    def _report_stop(self, decision: Decision) -> None:
        """A failure that is reported later may be the first cause, and may end the job, or not be healed in place.

        So a restart or a heal is announced when it takes place.
        """
        if decision.cause is None:
            self._report_reason(decision.reason)
            return
        self._held = decision.reason
        if decision.in_place:  # ranks may take long to leave a collective
            cause = decision.cause
            self.say(f"rank {cause.rank} on {cause.node}: {cause.reason}; pausing the other ranks")

    def _report_reason(self, reason: str) -> None:
        self._held = ""
        if reason and reason != self._last_reason:
            self._last_reason = reason
            self.say(reason)


def _kept_text(state: Supervision) -> str:
    mine = state.assignment
    assert mine is not None
    new = [rank for rank in range(mine.nproc) if rank not in state.kept]
    where = f" on {state.agent.node}" if mine.n_nodes > 1 else ""
    keep = "keeps its process" if len(state.kept) == 1 else "keep their processes"
    starts = f"; {ranks(_global(state, new))} {'is' if len(new) == 1 else 'are'} started anew" if new else ""
    return f"generation {mine.generation}{where}: {ranks(_global(state, state.kept))} {keep}{starts}"


def _global(state: Supervision, local_ranks: Iterable[int]) -> list[int]:
    assert state.assignment is not None
    return [state.assignment.rank_offset + rank for rank in local_ranks]
