"""What the house uses of the history: an agent keeps its job, and ddpctl finds the jobs that were kept."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_launch_wings.history import story_file
from ddp_launch_wings.history.story_file import IN_LOGS, Label

if TYPE_CHECKING:
    from ddp_launch_wings.history.finished import FinishedJob
    from ddp_launch_wings.history.story_file import Measured
    from rendezvous.rounds.event_log import Past
    from rendezvous.service.owner import OpenJob
    from rendezvous.values.job_state import JobState
    from rendezvous.values.questions import LogsWanted, Told


# What an agent writes: soon after the start of its job, some seconds after each change, and at the end.
#
# So a job whose agent was killed has a file without an end. All of it happens in threads, beside the job, and a file
# system that hangs delays nothing but the last message, for a second.

_AFTER_S = 2.0  # most jobs of seconds are written once
_LAST_S = 1.0  # for the file system, at the end
_OUTPUT_BYTES = 1 << 20  # of a job whose logs are removed, for all of its streams
_MOST_STREAMS = 128


class HistoryWriter:
    """Writes one job. `folder`: of the user, "" for none. `logs`: of the output; `is_temporary`: it may be removed."""

    measured: Callable[[], Measured]

    def __init__(self, job: OpenJob, folder: str, most: int, logs: str, *, is_temporary: bool) -> None:
        self._job, self._folder, self._most = job, folder if most > 0 else "", most
        self._logs, self._is_temporary = logs, is_temporary
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._is_over = False
        pid = os.getpid()
        self._label = Label(job.job_id, os.uname().nodename, pid, story_file.process_of(pid), logs)
        self._is_worth_it = bool(self._folder) or not is_temporary

    def follow(self) -> None:
        if self._is_worth_it:
            self._job.on_news = self._soon

    def _soon(self) -> None:
        if self._timer is None and not self._is_over:
            self._timer = self._loop.call_later(_AFTER_S, self._write_later)

    def _write_later(self) -> None:
        self._timer = None
        told = self._job.state, self._job.past(), self.measured()
        self._in_thread(lambda: self._write(self._label, *told, is_last=False))

    def _in_thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="history of jobs", daemon=True)
        thread.start()
        return thread

    def end(self, *, removes_logs: bool) -> None:
        """The job has ended, or this agent has left it. Call it before the logs are removed. For any thread."""
        if not self._is_worth_it or self._job.state.spec is None:
            return
        told = self._job.state, self._job.past(), self.measured()
        self._in_thread(lambda: self._end(*told, removes_logs)).join(_LAST_S)

    def _end(self, state: JobState, past: Past, measured: Measured, removes_logs: bool) -> None:
        label = self._label
        if removes_logs:
            label = replace(label, logs=story_file.output_of(self._path(past)) if self._folder else "")
            with suppress(OSError):
                self._make_folder()
                _copy_ends(self._logs, label.logs)
        self._write(label, state, past, measured, is_last=True)

    def _path(self, past: Past) -> str:
        return os.path.join(self._folder, story_file.name_of(self._label, past.began_at))

    def _write(self, label: Label, state: JobState, past: Past, measured: Measured, *, is_last: bool) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = is_last
            content = story_file.encoded(label, state, past, measured)
            if not self._is_temporary:
                with suppress(OSError):
                    story_file.write(os.path.join(self._logs, IN_LOGS), content)
            if not self._folder:
                return
            with suppress(OSError):
                self._make_folder()
                story_file.write(self._path(past), content)
                story_file.prune(self._folder, self._most, story_file.now())

    def _make_folder(self) -> None:
        """Raises `OSError`, also if others can write there."""
        os.makedirs(self._folder, 0o700, exist_ok=True)
        if not story_file.is_ours(self._folder):
            raise PermissionError(self._folder)


def _copy_ends(logs: str, to: str) -> None:
    """The last bytes of each stream of the last generation."""
    if not to or not story_file.has_room(os.path.dirname(to)):
        return
    found = list(_last_streams(logs))[:_MOST_STREAMS]
    for path in found:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _OUTPUT_BYTES // len(found)))
            data = file.read()
        copy = os.path.join(to, os.path.relpath(path, logs))
        os.makedirs(os.path.dirname(copy), 0o700, exist_ok=True)
        with open(copy, "wb") as file:
            file.write(data if size == len(data) else data.partition(b"\n")[2] or data)


def _last_streams(logs: str) -> Iterator[str]:
    generations = [name for name in os.listdir(logs) if name.startswith("generation_")]
    last = max(generations, key=lambda name: int(name.partition("_")[2] or 0), default="")
    ranks = (
        [name for name in os.listdir(os.path.join(logs, last)) if name.startswith("rank_")] if last else []
    )
    for rank in sorted(ranks, key=lambda name: int(name.partition("_")[2] or 0)):
        for stream in ("stdout", "stderr"):
            path = os.path.join(logs, last, rank, f"{stream}.log")
            if os.path.isfile(path) and os.path.getsize(path):
                yield path


def keeper(job: OpenJob, folder: str, most: int, logs: str, *, is_temporary: bool) -> HistoryWriter:
    """`folder`: as --history-dir names it; "" for the folder of this user."""
    from ddp_launch_wings.history.story_file import folder_of

    chosen = folder_of(folder) if most else ""
    return HistoryWriter(job, chosen, most, logs, is_temporary=is_temporary)


async def logs_in(folder: str, wanted: LogsWanted) -> Told:
    from ddp_launch_wings.history import finished

    return await finished.Files(folder).ask(wanted, 0.0)


def finished_jobs(folder: str, log_dir: str) -> list[FinishedJob]:
    """`folder`: as for `keeper`."""
    from ddp_launch_wings.history import finished

    return finished.finished_jobs(folder, log_dir)
