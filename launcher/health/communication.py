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
import contextlib
import json
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from launcher.exchange import AgentEvent, CannotHeal, CommunicationFailed, RankHeals, RankParked
from launcher.failure.verdict import cause_of_asynchronous
from launcher.health import dumps, flight_recorder
from launcher.health.guards import Guards, Lost
from launcher.machine import devices
from rendezvous.values.rank_view import HELD
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from launcher.failure.verdict import RankEnd
    from launcher.health.flight_recorder import Dump
    from launcher.health.guards import Continuation
    from rendezvous.values.rank_view import RankReport


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
        self._ras_at: tuple[str, int] | None = None
        self._ras: asyncio.Task[tuple[str, ...]] | None = None

    async def begin(self) -> None:
        await self._guards.listen()
        gpus = devices.nvidia_gpus(os.environ) or devices.amd_gpus(os.environ)
        self._ranks.env_for_guards = partial(self._env, bool(gpus))
        if gpus or "NCCL_RAS_ADDR" in os.environ:
            self._ras_at = address(os.environ)

    def _env(self, gpus: bool, directory: str, scratch: str) -> dict[str, str]:
        nccl = flight_recorder.shared(os.environ) | flight_recorder.of_rank(directory, scratch, os.environ)
        return self._guards.env() | (nccl if gpus else {})

    def end(self) -> None:
        asked = (self._dump[1] if self._dump is not None else None, self._ras)
        for task in (*self._reports, *asked):
            if task is not None:
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
            self._ras = asyncio.get_running_loop().create_task(self._ask_ras())
        _generation, task = self._dump
        await asyncio.wait([task], timeout=_RECORDERS_WITHIN_S)
        found = task.result() if task.done() else await asyncio.to_thread(dumps.those_there, folders)
        return await asyncio.to_thread(flight_recorder.with_recorded, reports, found, time.time_ns())

    async def with_monitor(self, generation: int, cause: Cause) -> Cause:
        """Wait for the dumps, and add what NCCL's own monitor shows, if anything."""
        if self._dump is None or self._dump[0] != generation:
            return cause
        await self._dump[1]
        monitored = await self._ras if self._ras is not None else ()
        ras_text = "\n".join(("NCCL's own monitor (RAS), all nodes:", *monitored)) if monitored else ""
        return replace(cause, traceback="\n\n".join(text for text in (cause.traceback, ras_text) if text))

    async def _ask_ras(self) -> tuple[str, ...]:
        if self._ras_at is None:
            return ()
        pids = self._ranks.pids()
        return flight_recorder.findings(await ask(self._ras_at, dumps.WITHIN_S), pids)

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


# --- NCCL's monitor --------------------------------------------------------------------------------
#
# Asks NCCL's own monitor (RAS) on this node for the state of the job's communicators, as JSON.

_ADDRESS, _ENABLED = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
_DEFAULT = ("localhost", 28028)
_MAX_BYTES = 16 << 20
_ASK = (
    b"CLIENT PROTOCOL 2\n",
    b"TIMEOUT 1\n",  # for each step on the way to a process that does not respond
    b"SET FORMAT json\n",
)


def address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where the monitor listens; None if it is switched off, or the setting is not an address."""
    if environ.get(_ENABLED) == "0":
        return None
    host, colon, port = environ.get(_ADDRESS, "").rpartition(":")
    if not colon:
        return _DEFAULT
    return (host.strip("[]"), int(port)) if port.isdecimal() and 0 < int(port) < 1 << 16 else None


async def ask(where: tuple[str, int], within_s: float) -> object:
    """Return the parsed answer; None if nothing answers in time, or NCCL is older than 2.28, which has no JSON."""
    try:
        async with asyncio.timeout(within_s):
            return await _ask(where)
    except (OSError, TimeoutError, ValueError, RecursionError, asyncio.IncompleteReadError):
        return None


async def _ask(where: tuple[str, int]) -> object:
    reader, writer = await asyncio.open_connection(*where)
    try:
        for line in _ASK:
            writer.write(line)
            answer = await reader.readline()
            if not answer.startswith((b"SERVER PROTOCOL", b"OK")):
                return None
        writer.write(b"STATUS\n")
        data = bytearray()
        while chunk := await reader.read(1 << 16):
            data += chunk
            if len(data) > _MAX_BYTES:
                return None
        return json.loads(data)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
