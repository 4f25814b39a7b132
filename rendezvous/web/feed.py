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
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.control.asking import inquire
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import RanksWanted
from rendezvous.web.stream import Backlog
from rendezvous.web.views import full_row, job_view, note_view, rank_rows, row_view

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rendezvous.control.asking import Caller
    from rendezvous.control.top_table import Row, Spent
    from rendezvous.web.recorder import Recorder
    from rendezvous.web.stream import Entry

_EVERY_S = 1.0
_WAIT_S = 3.0  # for agents
_LINGER_S = 30.0
_NOTES = 1000
_UNREAD = 256  # events that a browser may have unread; then its stream ends, and it catches up with a new one
_JOB, _RANKS, _POINTS, _NOTE, _GONE = "job", "ranks", "points", "note", "gone"
_log = logging.getLogger("rendezvous")


class Feed:
    def __init__(self, caller: Caller, recorder: Recorder, job_id: str) -> None:
        self.job_id = job_id
        self._caller, self._recorder = caller, recorder
        self._backlog = Backlog(os.urandom(6).hex(), frozenset((_JOB, _RANKS)))
        self._readers: set[asyncio.Queue[Entry | None]] = set()
        self._notes: deque[dict[str, Any]] = deque(maxlen=_NOTES)
        self._job: dict[str, Any] | None = None
        self._ranks: dict[str, Any] = {"rows": [], "silent": []}
        self._rows: dict[int, Row] = {}
        self._spent: Spent = {}
        self._points_seen = 0
        self._look_now = asyncio.Event()
        self._left_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    # --- readers -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `grpc.aio.AioRpcError` if the job cannot be seen."""
        await self._look_at_job()
        self._points_seen = self._recorder.series(self.job_id).added
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
        points = self._recorder.series(self.job_id).points
        return {
            "job": self._job,
            "ranks": self._ranks,
            "points": [point.as_list() for point in points],
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
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                self._publish(_GONE, {"reason": error.details()})
            elif error.code() is not grpc.StatusCode.FAILED_PRECONDITION:  # it has no ranks yet
                self._say_ranks({**self._ranks, "silent": [error.details() or "the service does not answer"]})
        except Exception:
            _log.exception("internal error: the page could not look at job %s", self.job_id)
        self._publish_points()

    async def _look_at_job(self) -> None:
        job = (await self._caller.call("GetJob", pb.GetJobRequest(job_id=self.job_id))).job
        view = job_view(job)
        if view != self._job:
            self._job = view
            self._publish(_JOB, view)

    async def _look_at_ranks(self) -> None:
        answers = await inquire(self._caller, self.job_id, RanksWanted(), wait_s=_WAIT_S)
        rows, self._spent, silent = rank_rows(answers, self._spent)
        self._rows = {row.seen.rank: row for row in rows}
        self._say_ranks({"rows": [row_view(row) for row in rows], "silent": silent})

    def _say_ranks(self, ranks: dict[str, Any]) -> None:
        if ranks != self._ranks:
            self._ranks = ranks
            self._publish(_RANKS, ranks)

    def _publish_points(self) -> None:
        series = self._recorder.series(self.job_id)
        new = series.added - self._points_seen
        if new > 0:
            self._points_seen = series.added
            self._publish(_POINTS, [point.as_list() for point in series.points[-new:]])


class Feeds:
    """The feeds of the jobs that somebody looks at."""

    def __init__(self, caller: Caller, recorder: Recorder) -> None:
        self._caller, self._recorder = caller, recorder
        self._feeds: dict[str, Feed] = {}
        self._starting = asyncio.Lock()

    async def of(self, job_id: str) -> Feed:
        """Raises `grpc.aio.AioRpcError`."""
        async with self._starting:
            feed = self._feeds.get(job_id)
            if feed is None or feed.is_over:
                feed = Feed(self._caller, self._recorder, job_id)
                await feed.start()
                self._feeds = {name: each for name, each in self._feeds.items() if not each.is_over}
                self._feeds[job_id] = feed
            return feed

    def known(self, job_id: str) -> Feed | None:
        return self._feeds.get(job_id)

    async def close(self) -> None:
        for feed in list(self._feeds.values()):
            await feed.close()
