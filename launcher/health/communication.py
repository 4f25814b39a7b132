"""Communication errors in the agent: lost peers, aborted collectives, and the dumps of flight recorders.

A rank whose collective failed raises an exception and ends soon. The report of its end has more details, so the report
of the guard is shown only if the rank does not end. A group that reports an asynchronous error is different: its ranks
keep waiting, so the agent reports a failure of the rank at once. Only if the error is the effect of a failure
elsewhere, the agent waits a moment: the stop of the job must not end the rank that failed first before it has reported
its own error.

A stop in place pauses the ranks that heal: see `guards`. Such a rank does not end after a failed collective: it waits
to be paused. If no failure is reported, for example after an error of the network, the agent reports the collective.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from launcher.exchange import AgentEvent, CannotHeal, CommunicationFailed, RankHeals, RankParked
from launcher.failure.verdict import RankEnd, cause_of_asynchronous
from launcher.health import dumps, flight_recorder
from launcher.health.flight_recorder import Dump
from launcher.health.guards import Continuation, Guards, Lost
from launcher.machine import devices
from rendezvous.values.rank_view import HELD, RankReport
from rendezvous.values.types import Cause, FailureClass

_STILL_RUNS_S = 2.0
_REASON_CHARS = 300
_RECORDERS_WITHIN_S = (
    1.0  # the service waits for the reply, and a rank in native code may hold the GIL forever
)
_SIGNAL_FIRST_S = 0.02
_OWN_ERROR_FIRST_S = 0.3  # torch's watchdog and the guard each look ten times per second


class RankProcesses(Protocol):
    """The ranks of this node, as this module needs them."""

    env_for_guards: Callable[
        [str, str], dict[str, str]
    ]  # of a rank's log folder and the node's scratch folder

    def folders(self) -> dict[int, str]: ...
    def pids(self) -> list[int]: ...
    def local_rank_of(self, rank: int, generation: int) -> int | None: ...
    async def facts_of(self, local_rank: int) -> RankEnd | None: ...


class CommunicationWatch:
    def __init__(
        self,
        scratch: str,
        ranks: RankProcesses,
        say: Callable[[str], None],
        happened: Callable[[AgentEvent], None],
    ) -> None:
        self._ranks, self._say, self._happened = ranks, say, happened
        self._scratch = scratch
        self._guards = Guards(scratch, self)
        self._dump: tuple[int, asyncio.Task[list[Dump]]] | None = None
        self._findings_text_for = self._aborted = -1  # generations
        self._reports: set[asyncio.Task[None]] = set()
        self._healing: dict[int, frozenset[int]] = {}  # of the latest generation: its local ranks that heal

    async def begin(self) -> None:
        await self._guards.listen()
        gpus = devices.nvidia_gpus(os.environ) or devices.amd_gpus(os.environ)
        self._ranks.env_for_guards = partial(self._env, bool(gpus))

    def _env(self, gpus: bool, directory: str, scratch: str) -> dict[str, str]:
        nccl = flight_recorder.shared(os.environ) | flight_recorder.of_rank(directory, scratch, os.environ)
        return self._guards.env() | (nccl if gpus else {})

    def end(self) -> None:
        for task in (*self._reports, *([self._dump[1]] if self._dump is not None else [])):
            task.cancel()
        self._guards.close()

    def abort_groups(self, generation: int, reason: str, only: tuple[int, ...] | None = None) -> None:
        """Abort the process groups shortly after SIGTERM, so that the script's handler runs first.

        `only`: of these local ranks.
        """
        self._aborted = generation
        among = partial(self._is_among, only, generation)
        loop = asyncio.get_running_loop()
        loop.call_later(_SIGNAL_FIRST_S, self._guards.abort_groups, generation, reason, among)

    def _is_among(self, local_ranks: tuple[int, ...] | None, generation: int, rank: int) -> bool:
        return local_ranks is None or self._ranks.local_rank_of(rank, generation) in local_ranks

    # --- ranks that keep their processes -----------------------------------------------------------

    def pause(self, generation: int, local_ranks: tuple[int, ...], reason: str) -> None:
        """Let these ranks leave their collectives and park."""
        self._aborted = generation
        self._guards.pause(generation, reason, partial(self._is_among, local_ranks, generation))

    def carry_on(self, move: Continuation) -> bool:
        """Let a parked rank continue. Return False if that is not possible."""
        return self._guards.carry_on(move)

    def healing_changed(self, rank: int, generation: int, heals: bool) -> None:
        if (local_rank := self._ranks.local_rank_of(rank, generation)) is not None:
            others = self._healing.get(generation, frozenset()) - {local_rank}
            self._healing = {generation: others | {local_rank} if heals else others}
            self._happened(RankHeals(generation, local_rank, heals))

    def parked(self, rank: int, generation: int) -> None:
        if (local_rank := self._ranks.local_rank_of(rank, generation)) is not None:
            self._happened(RankParked(generation, local_rank))

    def cannot_heal(self, rank: int, generation: int, reason: str) -> None:
        if (local_rank := self._ranks.local_rank_of(rank, generation)) is not None:
            self._happened(CannotHeal(generation, local_rank, f"rank {rank}: {reason}"))

    # --- dumps -----------------------------------------------------------------------------------------

    async def profile(
        self, generation: int, rank: int, seconds: float, path: str, within_s: float
    ) -> tuple[str, int] | None:
        return await self._guards.profile(generation, rank, seconds, path, within_s)

    async def with_recorders(
        self, generation: int, reports: tuple[RankReport, ...]
    ) -> tuple[RankReport, ...]:
        """Add the flight recorders of the ranks that can respond. Their dumps are kept in the log directory."""
        able = [report.rank for report in reports if report.alive and report.process not in (*HELD, "D")]
        folders = {rank: folder for rank, folder in self._ranks.folders().items() if rank in able}
        if self._dump is None or self._dump[1].done():
            gathering = dumps.gather(self._guards, self._scratch, generation, folders)
            self._dump = generation, asyncio.get_running_loop().create_task(gathering)
        _generation, task = self._dump
        await asyncio.wait([task], timeout=_RECORDERS_WITHIN_S)
        found = task.result() if task.done() else await asyncio.to_thread(dumps.those_there, folders)
        return await asyncio.to_thread(flight_recorder.with_recorded, reports, found, time.time_ns())

    async def await_dumps(self, generation: int) -> None:
        """Return when the dumps are in the log directory: after that, the ranks may be stopped."""
        if self._dump is not None and self._dump[0] == generation:
            await self._dump[1]

    # --- errors ------------------------------------------------------------------------------------

    def communication_failed(self, lost: Lost) -> None:
        local_rank = self._ranks.local_rank_of(lost.rank, lost.generation)
        if local_rank is None or lost.generation <= self._aborted:
            return
        if lost.asynchronous:
            self._begin(self._report_asynchronous(lost, local_rank))
        elif self._findings_text_for < lost.generation:
            self._findings_text_for = lost.generation
            self._begin(self._report_if_it_still_runs(lost, local_rank))

    async def _report_asynchronous(self, lost: Lost, local_rank: int) -> None:
        facts = await self._ranks.facts_of(local_rank)
        if facts is None:  # the rank has ended meanwhile: the report of its end has more details
            return
        cause = cause_of_asynchronous(facts, lost.text)
        if cause.failure is FailureClass.CONSEQUENCE:
            await asyncio.sleep(_OWN_ERROR_FIRST_S)
        if self._ranks.local_rank_of(lost.rank, lost.generation) is not None:
            self._happened(CommunicationFailed(lost.generation, cause))

    async def _report_if_it_still_runs(self, lost: Lost, local_rank: int) -> None:
        """A rank that heals waits until it is paused. If it has not finished a step since, no other rank has failed."""
        before = await self._ranks.facts_of(local_rank)
        await asyncio.sleep(_STILL_RUNS_S)
        now = await self._ranks.facts_of(local_rank)
        lives = self._ranks.local_rank_of(lost.rank, lost.generation) is not None
        if not lives or lost.generation <= self._aborted or before is None or now is None:
            return
        if local_rank in self._healing.get(lost.generation, ()) and now.step == before.step:
            cause = _cause(now, lost.text)
            self._happened(CommunicationFailed(lost.generation, cause))
            return
        self._say(
            f"ddp-launch: rank {lost.rank} reported a communication error but still runs (its script may have caught "
            f"the error): {lost.text}"
        )

    def _begin(self, report: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(report)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)


def _cause(facts: RankEnd, text: str) -> Cause:
    reason = f"{text.partition(chr(10))[0][:_REASON_CHARS]} (no other failure was reported)"
    return Cause(
        *(facts.node, facts.rank, facts.local_rank, FailureClass.CONSEQUENCE, reason),
        exit_code=1,
        step=facts.step,
        place=facts.place,
        ran_s=facts.ran_s,
        at=facts.at,
        log=facts.log,
    )
