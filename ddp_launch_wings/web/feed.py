"""What the page shows of one job, live, for all who look at it: one task looks, however many browsers there are.

Every second it asks the agents what the ranks do, as `ddpctl top` does, and reads the state of the job. The journal
arrives by itself. The task ends some time after the last browser has left, so one that only lost its connection finds
what it has missed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

import grpc
import grpc.aio

from ddp_launch_wings.web.requests import Backlog, Entry
from rendezvous.codec import decode
from rendezvous.control.ctl_text import phase_of
from rendezvous.control.service import Caller, inquire
from rendezvous.control.top_table import RankRow, Spent, own_s, phase_text, rows_of
from rendezvous.control.why import PARTS, Story
from rendezvous.control.why import rows_of as story_rows
from rendezvous.grpc_io import reason_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.event_log import Series, TimePoint
from rendezvous.values.questions import (
    CannotAnswer,
    FromConversation,
    LoggedSeen,
    LoggedWanted,
    RanksSeen,
    RanksWanted,
    StepSeen,
)
from rendezvous.values.rank_time import CLASSES, JobTime, in_words
from rendezvous.values.types import Decision, DecisionKind

_log = logging.getLogger("rendezvous")


_EVERY_S = 1.0
_WAIT_S = 3.0  # for agents
_LINGER_S = 30.0
_NOTES = 1000
_UNREAD = 256  # events that a browser may have unread; then its stream ends, and it catches up with a new one
_JOB, _RANKS, _POINTS, _NOTE, _GONE = "job", "ranks", "points", "note", "gone"
_LOGGED = "logged"
_MOST_LOGGED = 40_000  # points of what the script measures, for browsers that come later


class Feed:
    def __init__(self, caller: Caller, job_id: str) -> None:
        self.job_id = job_id
        self._caller = caller
        self._backlog = Backlog(os.urandom(6).hex(), frozenset((_JOB, _RANKS)))
        self._readers: set[asyncio.Queue[Entry | None]] = set()
        self._notes: deque[dict[str, Any]] = deque(maxlen=_NOTES)
        self._job: dict[str, Any] | None = None
        self._ranks: dict[str, Any] = {"rows": [], "silent": []}
        self._rows: dict[int, RankRow] = {}
        self._spent: Spent = {}
        self._series = Series()
        self._points_until = 0.0
        self._logged: list[list[Any]] = []
        self._logged_last = 0
        self._look_now = asyncio.Event()
        self._left_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    # --- readers -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `grpc.aio.AioRpcError` if the job cannot be seen."""
        await self._look_at_job()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"page of {self.job_id}")

    @property
    def name(self) -> str:
        return self._backlog.name

    @property
    def is_over(self) -> bool:
        return self._task is None or self._task.done()

    async def events(self, last_id: str) -> AsyncIterator[Entry | None]:
        """What the reader has missed or a snapshot, then what happens. None: nothing, for some time."""
        queue: asyncio.Queue[Entry | None] = asyncio.Queue(_UNREAD)
        missed = self._backlog.since(last_id) if last_id else None
        self._readers.add(queue)
        self._left_at = None
        try:
            for entry in missed if missed is not None else [self._backlog.snapshot(self._snapshot())]:
                yield entry
            while not self.is_over:
                try:
                    entry_or_end = await asyncio.wait_for(queue.get(), 10.0)
                except TimeoutError:
                    yield None
                    continue
                if entry_or_end is None:
                    return
                yield entry_or_end
        finally:
            self._readers.discard(queue)
            if not self._readers:
                self._left_at = asyncio.get_running_loop().time()

    def rank(self, rank: int) -> dict[str, Any] | None:
        row = self._rows.get(rank)
        return None if row is None else full_row(row)

    def _snapshot(self) -> dict[str, Any]:
        return {
            "job": self._job,
            "ranks": self._ranks,
            "points": [point_view(point) for point in self._series.points],
            "logged": self._logged,
            "notes": list(self._notes),
        }

    def _publish(self, kind: str, what: Any) -> None:
        entry = self._backlog.add(kind, what)
        for queue in list(self._readers):
            if queue.full():
                self._end(queue)
            else:
                queue.put_nowait(entry)

    def _end(self, queue: asyncio.Queue[Entry | None]) -> None:
        self._readers.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    async def close(self) -> None:
        for queue in list(self._readers):
            self._end(queue)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- looking -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        following = loop.create_task(self._follow(), name=f"journal of {self.job_id} for the page")
        try:
            while self._left_at is None or loop.time() - self._left_at < _LINGER_S:
                await self._look()
                self._look_now.clear()
                try:
                    await asyncio.wait_for(self._look_now.wait(), _EVERY_S)
                    await asyncio.sleep(_EVERY_S / 10)  # several notes belong to one change
                except TimeoutError:
                    pass
        finally:
            following.cancel()
            await asyncio.wait([following])
            for queue in list(self._readers):
                self._end(queue)

    async def _follow(self) -> None:
        """The journal, also of a job whose next run begins after the end of the last one."""
        latest = 0
        while True:
            try:
                async for note in self._caller.notes(self.job_id, follow=True):
                    if note.seq > latest:
                        latest = note.seq
                        self._take_note(note_view(note))
            except grpc.aio.AioRpcError as error:
                _log.debug("the page cannot read the journal of %s now: %s", self.job_id, error.details())
            await asyncio.sleep(_EVERY_S)

    def _take_note(self, note: dict[str, Any]) -> None:
        self._notes.append(note)
        self._publish(_NOTE, note)
        self._look_now.set()

    async def _look(self) -> None:
        try:
            await self._look_at_job()
            if self._job is not None and not self._job["is_over"]:
                await self._look_at_ranks()
            await self._look_at_logged()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                self._publish(_GONE, {"reason": error.details()})
            elif error.code() is not grpc.StatusCode.FAILED_PRECONDITION:  # it has no ranks yet
                self._say_ranks({**self._ranks, "silent": [reason_of(error)]})
        except Exception:
            _log.exception("internal error: the page could not look at job %s", self.job_id)

    async def _look_at_job(self) -> None:
        request = pb.GetJobRequest(job_id=self.job_id, points_after=self._points_until)
        job = (await self._caller.call("GetJob", request)).job
        view = job_view(job)
        if view != self._job:
            self._job = view
            self._publish(_JOB, view)
        new = [decode(TimePoint, each) for each in job.points]
        for point in new:
            self._series = self._series.offered(point)
        if new:
            self._points_until = new[-1].at
            self._publish(_POINTS, [point_view(point) for point in new])

    async def _look_at_ranks(self) -> None:
        answers = await inquire(self._caller, self.job_id, RanksWanted(), wait_s=_WAIT_S)
        rows, self._spent, silent = rank_rows(answers, self._spent)
        self._rows = {row.seen.rank: row for row in rows}
        slow = {rank for node in (self._job or {}).get("where", ()) for rank in node["slow_ranks"]}
        self._say_ranks({"rows": [row_view(row, slow) for row in rows], "silent": silent})

    async def _look_at_logged(self) -> None:
        """What the script measures, from the node of rank 0. A new agent there begins again."""
        wanted = LoggedWanted(self._logged_last)
        try:
            ((_, told),) = await inquire(self._caller, self.job_id, wanted, ranks=[0], wait_s=_WAIT_S)
        except grpc.aio.AioRpcError:
            if self._job is not None and self._job["is_over"]:  # its agents are gone, and no file has it
                return
            raise
        if not isinstance(told, LoggedSeen):
            return
        if told.last < self._logged_last:
            self._logged_last = 0
            return
        self._logged_last = told.last
        new = [[each.name, each.step, each.value, each.generation] for each in told.points]
        if new:
            self._logged = (self._logged + new)[-_MOST_LOGGED:]
            self._publish(_LOGGED, new)

    def _say_ranks(self, ranks: dict[str, Any]) -> None:
        if ranks != self._ranks:
            self._ranks = ranks
            self._publish(_RANKS, ranks)


class Feeds:
    """The feeds of the jobs that have a viewer."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._feeds: dict[str, Feed] = {}
        self._starting: dict[str, asyncio.Task[Feed]] = {}

    async def of(self, job_id: str) -> Feed:
        """Raises `grpc.aio.AioRpcError`. A job that answers late delays only those who look at it."""
        feed = self._feeds.get(job_id)
        if feed is not None and not feed.is_over:
            return feed
        starting = self._starting.get(job_id)
        if starting is None:
            starting = asyncio.get_running_loop().create_task(self._start(job_id), name=f"page of {job_id}")
            self._starting[job_id] = starting
            starting.add_done_callback(lambda _: self._starting.pop(job_id, None))
        return await asyncio.shield(starting)

    async def _start(self, job_id: str) -> Feed:
        feed = Feed(self._caller, job_id)
        await feed.start()
        self._feeds = {name: each for name, each in self._feeds.items() if not each.is_over}
        self._feeds[job_id] = feed
        return feed

    def known(self, job_id: str) -> Feed | None:
        return self._feeds.get(job_id)

    async def close(self) -> None:
        if starting := list(self._starting.values()):
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
        for feed in list(self._feeds.values()):
            await feed.close()


# --- views ------------------------------------------------------------------------------------------
#
# What the page gets to know of a job and its ranks, as JSON. Pure, but for protobuf messages.

_LATE_S = 10.0  # a heartbeat
_MIB = 1 << 20
BYTES_OF = {
    **{"float64": 8, "int64": 8, "complex64": 8, "complex128": 16},
    **{"float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}  # other types have four


def summary(job: Any) -> dict[str, Any]:
    """A row of the list of jobs."""
    same = _same(job, "generation min_nodes max_nodes restarts heals reason")
    nodes = job.nodes or job.members
    goodput = job.goodput if job.HasField("goodput") else None
    times = {**_same(job, "began_at ended_at"), "goodput": goodput}
    return {
        "job": job.job_id,
        "phase": phase_of(job),
        "nodes": nodes,
        "ranks": job.world_size,
        **same,
        **times,
    }


def _same(found: Any, names: str) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names.split()}


def job_view(job: Any) -> dict[str, Any]:
    decisions = [decode(Decision, each) for each in job.decisions]
    view = {
        **summary(job.summary),
        "is_over": job.summary.phase == pb.PHASE_ENDED,
        "where": [_node(node) for node in job.nodes],
        "decisions": [_decision(each) for each in decisions],
        "failures": [
            {"generation": each.generation, **_same(each.cause, "rank node reason")} for each in job.failures
        ],
        "time": "",
    }
    if job.HasField("time"):
        view["time"] = in_words(decode(JobTime, job.time))
    return view


def _node(node: Any) -> dict[str, Any]:
    placed = node.HasField("node_rank")
    return {
        **_same(node, "node nproc address present excluded block hardware"),
        "node_rank": node.node_rank if placed else None,
        "first": node.rank_offset if placed else None,
        "late_s": round(node.heard_s) if node.heard_s > _LATE_S else 0,
        "health": list(node.health),
        "slow_ranks": list(node.slow_ranks),
    }


def _decision(decision: Decision) -> dict[str, Any]:
    is_failure = decision.kind not in (DecisionKind.FINISH, DecisionKind.GROW)
    return {**_same(decision, "generation title reason"), "is_failure": is_failure}


def point_view(point: TimePoint) -> list[Any]:
    sums = (*(getattr(point.time.spent, name) for name in CLASSES), point.time.hidden)
    return [point.at, point.generation, point.time.ranks, point.steps, *sums]


def note_view(note: Any) -> dict[str, Any]:
    return _same(note, "seq at generation kind node text")


# --- ranks ---------------------------------------------------------------------------------------------------


def rank_rows(
    answers: Iterable[tuple[str, FromConversation]], before: Spent
) -> tuple[list[RankRow], Spent, list[str]]:
    """The rows by rank, what the next look compares with, and the nodes that did not answer."""
    answers = list(answers)
    seen = [(node, rank) for node, told in answers if isinstance(told, RanksSeen) for rank in told.ranks]
    rows, spent = rows_of(seen, before)
    silent = [f"node {node}: {told.reason}" for node, told in answers if isinstance(told, CannotAnswer)]
    return sorted(rows, key=lambda row: row.seen.rank), spent, silent


ROW = (
    *(
        "rank",
        "phase",
        "step",
        "mean_ms",
        "own_ms",
        "ratio",
        "slow",
        "share",
        "memory_mib",
        "gpu",
        "gpu_memory_mib",
        "quiet_s",
    ),
    *("starts", "alive", "known"),
)


def row_view(row: RankRow, named: Collection[int] = ()) -> list[Any]:
    """The values of `ROW`: a list, because there may be thousands, once a second. `named`: the stragglers."""
    seen, gpu, standing = row.seen, row.seen.gpu, row.standing
    level = standing.level if standing is not None else 0
    return [
        seen.rank,
        phase_text(seen),
        seen.step,
        round(seen.mean_step_s * 1e3, 2),
        round(own_s(row) * 1e3, 2),
        round(standing.ratio, 2) if standing is not None else 1,
        max(level, 1) if seen.rank in named else level,
        None if row.share is None else round(row.share, 3),
        seen.memory // _MIB,
        None if gpu is None else gpu.utilization,
        None if gpu is None else gpu.memory_used // _MIB,
        round(seen.quiet_s, 1),
        seen.starts,
        int(seen.alive),
        int(seen.known),
    ]


def step_view(step: StepSeen) -> dict[str, Any]:
    calls = [
        {
            **_same(each, "op group dtype is_async start_s end_s"),
            "bytes": each.numel * BYTES_OF.get(each.dtype, 4),
        }
        for each in sorted(step.calls, key=lambda call: call.start_s)
    ]
    phases = [[str(each.phase), each.start_s, each.end_s] for each in step.phases]
    return {**_same(step, "step duration_s"), "phases": phases, "calls": calls}


# --- the story of a failure ----------------------------------------------------------------------------------


def story_view(story: Story, job: Any) -> dict[str, Any]:
    """The same rows as `ddpctl why`, and the parts of the restart as numbers."""
    times = story.times
    parts = {part: None if times is None else getattr(times, f"{part}_s") for part in PARTS}
    decisions = [_decision(decode(Decision, each)) for each in job.decisions]
    known = [each.generation for each in job.failures]
    known += [each["generation"] for each in decisions if each["is_failure"]]
    return {
        "generation": story.generation,
        "generations": sorted(set(known)),
        "rows": [list(row) for row in story_rows(story) if row[0] != "took"],
        "parts": parts,
        "is_hang": story.cause is not None and str(story.cause.failure) == "hang",
        "traceback": story.cause.traceback if story.cause is not None else "",
    }


def full_row(row: RankRow) -> dict[str, Any]:
    """What is known of one rank besides its row."""
    logged = [[each.name, each.step, each.value] for each in row.seen.logged]
    return {"node": row.node, **_same(row.seen, "rank pid doing message"), "logged": logged}
