"""Answers questions about the ranks of this node: what they do, their stacks, their output.

Nothing here changes the state of the agent, and no answer can fail the job: an error becomes an answer with a message.
Answers that read files or wait for ranks run beside the agent's main loop, a few at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from launcher.answers.measured import Measured, use_values
from launcher.health.page import in_words, times_of
from launcher.health.stacks import native_stacks, stacks_of, without_ours
from launcher.machine.gpu_reading import text_of
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import (
    MOST_WAIT_S,
    CannotAnswer,
    Checkpointed,
    CheckpointWanted,
    Drilled,
    DrillWanted,
    GpuSeen,
    LoggedValue,
    LoggedWanted,
    LogPieces,
    LogsWanted,
    ProfileWanted,
    RankSeen,
    RanksSeen,
    RanksWanted,
    Remark,
    Stacks,
    StacksWanted,
    StepCall,
    StepPhase,
    StepSeen,
    StepWanted,
    Told,
    TraceWanted,
    Wanted,
)

if TYPE_CHECKING:
    from launcher.answers.restart_watch import Traces
    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import Supervision
    from launcher.health.node_watch import NodeWatch
    from launcher.machine.gpu_state import Gpu
    from launcher.output.log_file import LogFiles
    from launcher.ranks.checkpoint_request import CheckpointRequester
    from launcher.ranks.worker import Workers
    from rendezvous.values.rank_view import Collective, RankPhase, RankView
    from rendezvous.values.types import Assignment


# The state of ranks as `ddpctl top` shows it, and one whole step of a rank. Pure.

# --- rows of the table -----------------------------------------------------------------------------
#
# The state of ranks as `ddpctl top` shows it.

_AS_ON_THE_PAGE = (
    *("rank", "known", "phase", "phase_s", "quiet_s", "step", "step_s", "last_step_s", "mean_step_s"),
    "message",
)


def rank_seen(
    view: RankView,
    local_rank: int,
    *,
    pid: int,
    memory: int,
    gpu: GpuSeen | None,
    starts: int,
    logged: tuple[LoggedValue, ...] = (),
) -> RankSeen:
    times = times_of(view)
    same: dict[str, Any] = {name: getattr(view, name) for name in _AS_ON_THE_PAGE}
    return RankSeen(
        **same,
        local_rank=local_rank,
        pid=pid,
        alive=view.process.alive,
        process=view.process.state,
        spent_s=times.own_s + times.waiting_s,
        waited_s=times.waiting_s,
        memory=memory,
        gpu=gpu,
        starts=starts,
        doing=in_words(view),
        logged=logged,
    )


def gpu_of(local_rank: int, nproc: int, gpus: Sequence[Gpu]) -> GpuSeen | None:
    """The GPU of a rank. Known only where every rank has one of its own, in this order, as scripts choose them."""
    if len(gpus) < nproc or not 0 <= local_rank < len(gpus) or gpus[local_rank].lost:
        return None
    gpu = gpus[local_rank]
    return GpuSeen(gpu.index, gpu.memory_used, gpu.memory_total, gpu.utilization)


# --- one whole step --------------------------------------------------------------------------------
#
# Puts together one whole step of a rank from looks at its status page: its phases and its collectives. Pure.
#
# The page has the start of the present phase, and the last 16 collectives with their times, to the nanosecond. So a
# look every few milliseconds is enough for exact times; only a phase that begins and ends between two looks is
# missed. The first step that ends may have begun before the first look, so the one after it is taken.

_EQUAL_S = 1e-5  # moments of one event, computed from two looks
_MOST_CALLS = 2000


@dataclass(frozen=True, slots=True)
class Looks:
    """What the looks so far have shown. Moments are of the clock of the looks."""

    first_step: int | None = None
    phases: tuple[tuple[float, RankPhase], ...] = ()  # with their starts, in order
    calls: Mapping[int, tuple[Collective, float, float | None]] = field(default_factory=dict)
    seen: StepSeen | None = None


def looked(looks: Looks, view: RankView, now: float) -> Looks:
    first = view.step if looks.first_step is None else looks.first_step
    began = now - view.phase_s
    phases = looks.phases
    if not phases or began - phases[-1][0] > _EQUAL_S:
        phases = (*phases, (began, view.phase))
    calls = dict(looks.calls)
    for each in view.collectives:
        if len(calls) < _MOST_CALLS or each.number in calls:
            ended = None if each.finished_s is None else now - each.finished_s
            calls[each.number] = (each, now - each.entered_s, ended)
    looks = Looks(first, phases, calls)
    return looks if view.step < first + 2 else replace(looks, seen=_step(looks, view, now))


def _step(looks: Looks, view: RankView, now: float) -> StepSeen:
    """The last step that has ended."""
    end = now - view.step_s
    start = end - view.last_step_s
    length = view.last_step_s
    starts = [*looks.phases, (now, view.phase)]
    spans = [(phase, began - start, until - start) for (began, phase), (until, _) in pairwise(starts)]
    phases = tuple(
        StepPhase(phase, max(0.0, began), min(length, until))
        for phase, began, until in spans
        if until > 0 and began < length
    )
    calls = tuple(
        StepCall(
            each.op, each.group, each.dtype, each.numel, each.is_async, began - start, _after(ended, start)
        )
        for each, began, ended in looks.calls.values()
        if began < end and (ended is None or ended > start)
    )
    return StepSeen(view.step, length, phases, calls)


def _after(moment: float | None, start: float) -> float | None:
    return None if moment is None else moment - start


_AT_ONCE = 2  # slow answers
_LOOK_AGAIN_S = 0.15  # for more output
_LONGEST_WAIT_S = 30.0
_LAST_ANSWERS_S = 1.0  # for which a follower may delay the end of the agent
_LAST_OUTPUT_S = 0.5  # until the last output is in the files
_LONGEST_STEPS_S = 30.0
_NO_DRILLS = "this job allows no drills: its owner has to start it with `ddp-launch --allow-drill`"
_LOOKS_PER_STEP, _FASTEST_LOOK_S, _SLOWEST_LOOK_S = 150, 0.002, 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Desk:
    def __init__(
        self,
        ranks: Workers,
        node: NodeWatch,
        files: LogFiles,
        requester: CheckpointRequester,
        traces: Traces,
        measured: Measured,
        boundary: ErrorBoundary,
        drilled: Callable[[Remark], None] | None = None,
    ) -> None:
        """`drilled` is told of each drill. None: this job allows none."""
        self._ranks, self._node, self._files, self._boundary = ranks, node, files, boundary
        self._requester, self._traces, self._measured = requester, traces, measured
        self._drilled = drilled
        self._thaws: dict[int, asyncio.TimerHandle] = {}  # by process that a drill has frozen
        self._checkpoints: list[asyncio.Future[bool]] = []
        self._state: Callable[[], Supervision] | None = None
        self._slow = asyncio.Semaphore(_AT_ONCE)
        self._followers = 0  # questions about output that wait for more of it
        self._asks_again_until = 0.0  # a client that follows the output is about to ask for more
        self._ending_at: float | None = None

    def begin(self, state: Callable[[], Supervision]) -> None:
        self._state = state

    async def answer(self, wanted: Wanted) -> Told:
        failed = CannotAnswer(
            "the agent could not answer because of an error; the output of its node names it"
        )
        return await self._boundary.awaited("answering a question", self._answer(wanted), failed)

    async def _answer(self, wanted: Wanted) -> Told:
        match wanted:
            case RanksWanted():
                return self._ranks_seen()
            case StacksWanted():
                return await self._stacks(wanted)
            case StepWanted():
                return await self._step(wanted)
            case LogsWanted():
                return await self._logs(wanted)
            case LoggedWanted():
                return self._measured.seen(wanted)
            case CheckpointWanted():
                return await self._checkpoint(wanted)
            case ProfileWanted():
                assignment = self._assignment
                return await self._traces.record(wanted, -1 if assignment is None else assignment.generation)
            case DrillWanted():
                return self._drill(wanted)
            case TraceWanted():
                return await self._traces.part(wanted)

    # --- what the ranks do -----------------------------------------------------------------------------

    def _ranks_seen(self) -> Told:
        assignment = self._assignment
        if assignment is None:
            return CannotAnswer("no rank was started on this node yet")
        seen = tuple(self._rank_seen(view, assignment) for view in self._ranks.pages.views())
        use = use_values(self._node.use)
        return RanksSeen(assignment.generation, assignment.restart_count, seen, use)

    @property
    def _assignment(self) -> Assignment | None:
        return None if self._state is None else self._state().assignment

    def _rank_seen(self, view: RankView, assignment: Assignment) -> RankSeen:
        local_rank = view.rank - assignment.rank_offset
        pid = self._ranks.pid_of(view.rank)
        return rank_seen(
            view,
            local_rank,
            pid=pid,
            memory=_resident_bytes(pid),
            gpu=gpu_of(local_rank, assignment.nproc, self._node.gpus),
            starts=self._ranks.starts.get(view.rank, 0),
            logged=self._measured.latest(view.rank),
        )

    async def _step(self, wanted: StepWanted) -> Told:
        """One whole step. It is watched for at most some seconds, or for two steps."""
        loop, assignment = asyncio.get_running_loop(), self._assignment
        give_up_at, looks = loop.time() + _LONGEST_STEPS_S, Looks()
        while assignment is not None and assignment is self._assignment and loop.time() < give_up_at:
            view = self._ranks.pages.view(wanted.rank - assignment.rank_offset)
            if view is None or not view.process.alive or not view.known:
                break
            looks = looked(looks, view, loop.time())
            if looks.seen is not None:
                return looks.seen
            await asyncio.sleep(
                min(_SLOWEST_LOOK_S, max(_FASTEST_LOOK_S, view.mean_step_s / _LOOKS_PER_STEP))
            )
        return CannotAnswer(
            f"rank {wanted.rank} has not finished two steps within {_LONGEST_STEPS_S:g} s, or does not run now"
        )

    # --- output ----------------------------------------------------------------------------------------

    async def _logs(self, wanted: LogsWanted) -> Told:
        loop = asyncio.get_running_loop()
        if wanted.wait_s <= 0:
            return await self._read(wanted)
        give_up_at = loop.time() + min(wanted.wait_s, _LONGEST_WAIT_S)
        self._followers += 1
        try:
            while True:
                is_last = self._is_last()
                found = await self._read(wanted)
                if found.pieces or is_last or loop.time() >= give_up_at:
                    break
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._followers -= 1
        is_last = is_last and not found.more
        self._asks_again_until = 0.0 if is_last else loop.time() + _LAST_ANSWERS_S
        return replace(found, ended=is_last)

    def _is_last(self) -> bool:
        if self._ending_at is None:
            return False
        late = asyncio.get_running_loop().time() > self._ending_at + _LAST_OUTPUT_S
        return late or all(log.history.kept().is_closed for log in self._files.known().values())

    async def _read(self, wanted: LogsWanted) -> LogPieces:
        from launcher.answers.log_reading import read_logs  # most jobs are never asked

        async with self._slow:
            return await asyncio.to_thread(read_logs, wanted, self._files.known(), time.time())

    async def end(self) -> None:
        """The ranks have ended: send their last output to those who follow it, before the agent leaves the job."""
        loop = asyncio.get_running_loop()
        self._ending_at = loop.time()
        while loop.time() < self._ending_at + _LAST_ANSWERS_S:
            if not self._followers and loop.time() > self._asks_again_until:
                break
            await asyncio.sleep(_LOOK_AGAIN_S / 4)

    # --- checkpoint ------------------------------------------------------------------------------------

    async def _checkpoint(self, wanted: CheckpointWanted) -> Told:
        assignment = self._assignment
        if assignment is None or not self._ranks.ranks():
            return CannotAnswer("no rank runs on this node now")
        if not self._requester.is_watched(assignment.generation):
            return CannotAnswer(
                "not all ranks of this node watch for requests: a script does with ddp.elastic "
                "(`ddp-launch docs elastic`)"
            )
        loop = asyncio.get_running_loop()
        began = loop.time()
        over = loop.create_future()
        self._checkpoints.append(over)
        if not self._requester.is_open:
            self._requester.ask(assignment.generation, wanted.reason, wanted.wait_s)
        try:
            return Checkpointed(
                await asyncio.wait_for(over, wanted.wait_s + _LAST_ANSWERS_S), loop.time() - began
            )
        except TimeoutError:
            return Checkpointed(taken=False, took_s=loop.time() - began)

    def checkpoint_over(self, *, taken: bool) -> None:
        waiting, self._checkpoints = self._checkpoints, []
        for over in waiting:
            if not over.done():
                over.set_result(taken)

    def _drill(self, wanted: DrillWanted) -> Told:
        """Signal a rank as anybody could: the launcher does not expect its end."""
        assignment, pid = self._assignment, self._ranks.pid_of(wanted.rank)
        generation = assignment.generation if assignment is not None and pid else 0
        if self._drilled is None:
            return CannotAnswer(_NO_DRILLS)
        if problem := drill_problem(wanted, generation):
            return CannotAnswer(problem)
        try:
            os.kill(pid, signal.SIGSTOP if wanted.freeze_s else signal.SIGKILL)
        except ProcessLookupError:
            return CannotAnswer(f"rank {wanted.rank} has just ended by itself")
        if pid in self._thaws:  # it is frozen for the time that was asked for last
            self._thaws.pop(pid).cancel()
        if wanted.freeze_s:
            self._thaws[pid] = asyncio.get_running_loop().call_later(wanted.freeze_s, self._thaw, pid)
        self._drilled(Remark(wanted.generation, "drill", f"drill by {wanted.by}, pid {pid}: {wanted.deed}"))
        return Drilled(pid)

    def _thaw(self, pid: int) -> None:
        del self._thaws[pid]
        if pid in self._ranks.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # --- stacks ----------------------------------------------------------------------------------------

    async def _stacks(self, wanted: StacksWanted) -> Told:
        pid = self._ranks.pid_of(wanted.rank)
        if not pid:
            return CannotAnswer(f"rank {wanted.rank} does not run on this node now")
        async with self._slow:
            text = without_ours(await stacks_of(pid))
            return Stacks(f"{text}\n\n{await native_stacks(pid)}" if wanted.native else text)


def drill_problem(wanted: DrillWanted, running: int) -> str:
    """Why the rank must not be signalled; empty if it may be. `running`: its generation, 0 without a process."""
    if not 0 <= wanted.freeze_s <= MOST_WAIT_S:
        return f"a rank is frozen for at most {MOST_WAIT_S:g} s"
    if not running or wanted.generation != running:
        return f"rank {wanted.rank} does not run in generation {wanted.generation} now: nothing was done"
    return ""


def _resident_bytes(pid: int) -> int:
    fields = text_of(f"/proc/{pid}/statm").split() if pid else []
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else 0
