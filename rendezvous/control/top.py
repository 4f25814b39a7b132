"""`ddpctl top`: what each rank does. On a terminal a live table; otherwise, and with `--once`, one table.

The screen uses only what every terminal knows, also over ssh: the alternate screen, moving to the first row, and
clearing to the end of a line. It is drawn in one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.control.ctl_text import phase_of, printable_lines
from rendezvous.control.formats import is_for_programs, show, warn, write
from rendezvous.control.service import inquire, job_named
from rendezvous.control.top_table import (
    Head,
    Sorting,
    View,
    keys_in,
    pressed,
    rows_of,
    screen,
    summary,
    table,
)
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import CannotAnswer, RanksSeen, RanksWanted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rendezvous.control.service import Service
    from rendezvous.control.top_table import Row, Spent

_WAIT_S = 3.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


async def run(service: Service, arguments: argparse.Namespace) -> int:
    job = await job_named(service, arguments.job)
    source = _Source(service, job)
    sorting = Sorting(arguments.sort, arguments.reverse)
    is_live = sys.stdout.isatty() and sys.stdin.isatty() and not arguments.once
    if is_live and not is_for_programs(arguments.output):
        return await _Live(source, View(Head(job), sorting=sorting), arguments.interval).run()
    await source.look()
    if is_for_programs(arguments.output):
        show(source.as_dict(), arguments.output)
    else:
        width = shutil.get_terminal_size((160, 24)).columns
        head, rows = table(source.rows, sorting, width)
        write("\n".join([*summary(source.rows, source.head), "", head, *rows]))
    for problem in source.head.problems:
        if is_for_programs(arguments.output):
            warn(problem)
    return 0 if source.rows else 1


class _Source:
    """The present state of the job and its ranks."""

    def __init__(self, service: Service, job: str) -> None:
        self._service, self._job = service, job
        self._spent: Spent = {}
        self.head = Head(job)
        self.rows: list[Row] = []
        self.is_over = False

    async def look(self) -> None:
        job = (await self._service.call("GetJob", pb.GetJobRequest(job_id=self._job))).job
        summary_now = job.summary
        self.is_over = summary_now.phase == pb.PHASE_ENDED
        self.head = Head(
            self._job, phase_of(summary_now), summary_now.generation, summary_now.nodes, summary_now.restarts
        )
        if self.is_over:
            return
        try:
            answers = await inquire(self._service, self._job, RanksWanted(), wait_s=_WAIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            self.rows = []
            self.head = replace(self.head, problems=(error.details() or "",))
            return
        seen = [(node, rank) for node, told in answers if isinstance(told, RanksSeen) for rank in told.ranks]
        self.rows, self._spent = rows_of([(printable_lines(node), rank) for node, rank in seen], self._spent)
        silent = [f"node {node}: {told.reason}" for node, told in answers if isinstance(told, CannotAnswer)]
        health = [f"node {n.node}: {text}" for n in job.nodes for text in n.health]
        self.head = replace(self.head, problems=tuple(printable_lines(text) for text in (*silent, *health)))

    def as_dict(self) -> dict[str, Any]:
        ranks = [{"node": row.node, **asdict(row.seen), "communication": row.share} for row in self.rows]
        return {**asdict(self.head), "problems": list(self.head.problems), "ranks": ranks}


class _Live:
    def __init__(self, source: _Source, view: View, interval_s: float) -> None:
        self._source, self._view, self._interval_s = source, view, interval_s
        self._changed = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        with _raw_terminal():
            loop.add_reader(sys.stdin.fileno(), self._read_keys)
            for signum, action in ((signal.SIGWINCH, self._changed.set), (signal.SIGTERM, self._quit)):
                loop.add_signal_handler(signum, action)
            looking = loop.create_task(self._look())
            try:
                while not self._view.is_over:
                    self._draw()
                    self._changed.clear()
                    await self._changed.wait()
                    if looking.done():
                        break
            finally:
                loop.remove_reader(sys.stdin.fileno())
                looking.cancel()
                await asyncio.wait([looking])
        if not looking.cancelled() and (error := looking.exception()) is not None:
            raise error
        write("\n".join(summary(self._source.rows, self._source.head)))
        return 0

    async def _look(self) -> None:
        """Look until the job ends. A failed call is shown, and the last table stays."""
        try:
            while not self._source.is_over:
                if not self._view.is_paused:
                    try:
                        await self._source.look()
                        self._view = replace(
                            self._view, head=self._source.head, rows=tuple(self._source.rows), note=""
                        )
                    except grpc.aio.AioRpcError as error:
                        if error.code() not in _PASSING:
                            raise
                        self._view = replace(self._view, note=f"no answer: {error.details()}; trying again")
                    self._changed.set()
                await asyncio.sleep(self._interval_s)
        finally:
            self._changed.set()

    def _read_keys(self) -> None:
        data = os.read(sys.stdin.fileno(), 256)
        if not data:
            self._quit()
        height = shutil.get_terminal_size().lines
        for key in keys_in(data):
            self._view = pressed(self._view, key, height)
        self._changed.set()

    def _quit(self) -> None:
        self._view = replace(self._view, is_over=True)
        self._changed.set()

    def _draw(self) -> None:
        columns, lines = shutil.get_terminal_size()
        rows = screen(self._view, columns, lines, color=not os.environ.get("NO_COLOR"))
        text = _HOME + f"{_REST_OF_LINE}\r\n".join(rows) + _REST_OF_LINE + _REST_OF_SCREEN
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Keys arrive one by one and are not shown; Ctrl-C still interrupts."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
