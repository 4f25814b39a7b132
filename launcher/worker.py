"""The ranks of this node: started through the zygote, and told of as facts when they end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.facts import OomWatch, read_error_record
from launcher.lines import RankLabel
from launcher.spec import EntryKind
from launcher.supervision import RankEnded
from launcher.verdict import RankEnd, cause_of
from launcher.worker_env import RankPlace, rank_args, rank_env
from launcher.zygote import SpawnOrder, rank_argv

if TYPE_CHECKING:
    from launcher.logs import LogPump
    from launcher.spec import LaunchSpec
    from launcher.template.wire import Message
    from launcher.zygote import Zygote
    from rendezvous.types import Assignment, StoreAddress

_LAST_WORDS_S = 0.05  # for what a failed rank wrote just before it ended to be read from its pipe


@dataclass(frozen=True, slots=True)
class _Started:
    label: RankLabel
    directory: str
    pid: int = 0


class Workers:
    def __init__(self, spec: LaunchSpec, logs: LogPump, host: str, cpus: tuple[tuple[int, ...], ...]) -> None:
        self._spec = spec
        self._logs = logs
        self._host = host
        self._cpus = cpus
        self._oom = OomWatch()
        self._live: dict[int, _Started] = {}
        self._stop_signal = 0
        self._stopped_at_ns = 0

    def start(self, zygote: Zygote, assignment: Assignment, store: StoreAddress) -> None:
        self._stop_signal = self._stopped_at_ns = 0
        for local_rank in range(assignment.nproc):
            label = RankLabel(
                self._host,
                assignment.rank_offset + local_rank,
                local_rank,
                assignment.role,
                assignment.generation,
            )
            place = RankPlace(assignment, local_rank, store, self._logs.rank_directory(label))
            fds = self._logs.open_rank(label)
            try:
                zygote.spawn(self._order(place), fds)
            finally:
                for fd in fds:
                    os.close(fd)
            self._live[local_rank] = _Started(label, place.directory)

    def _order(self, place: RankPlace) -> SpawnOrder:
        entry = self._spec.entry
        args = rank_args(entry.args, place.local_rank)
        return SpawnOrder(
            local_rank=place.local_rank,
            generation=place.assignment.generation,
            argv=rank_argv(entry, self._spec.python, args),
            args=args if args != entry.args else None,
            env=rank_env(self._spec, place, os.environ),
            cpus=self._cpus[place.local_rank] if self._cpus else (),
            group=entry.kind is EntryKind.PROGRAM,
            store_kept=place.store.kept,
        )

    def note_started(self, message: Message) -> None:
        started = self._live.get(message["rank"])
        if started is not None and started.label.generation == message["generation"]:
            self._live[message["rank"]] = replace(started, pid=message["pid"])

    def note_stop(self, signum: int) -> None:
        self._stop_signal = signum
        self._stopped_at_ns = self._stopped_at_ns or time.time_ns()

    def ended(self, message: Message) -> RankEnded:
        local_rank: int = message["rank"]
        started = self._live.pop(local_rank)
        cause = None
        if message["exit_code"] != 0:
            cause = cause_of(self._end_of(started, message))
        return RankEnded(message["generation"], local_rank, cause)

    def lost_with_zygote(self) -> list[RankEnded]:
        messages = [
            {
                "rank": local_rank,
                "generation": started.label.generation,
                "pid": started.pid,
                "exit_code": None,
                "signal": int(signal.SIGKILL),
                "ran_s": 0.0,
            }
            for local_rank, started in self._live.items()
        ]
        return [self.ended(message) for message in messages]

    def _end_of(self, started: _Started, message: Message) -> RankEnd:
        label = started.label
        self._logs.catch_up(label.rank, label.generation, _LAST_WORDS_S)
        killed = message["signal"] == signal.SIGKILL and self._stop_signal != signal.SIGKILL
        return RankEnd(
            node=self._host,
            rank=label.rank,
            local_rank=label.local_rank,
            exit_code=message["exit_code"],
            signal=message["signal"],
            stopped_by_us=self._stop_signal,
            stderr_tail=self._logs.stderr_tail(label.rank, label.generation).decode(errors="replace"),
            error_record=read_error_record(os.path.join(started.directory, "error.json")),
            oom_killed=self._oom.killed(message["pid"]) if killed else None,
            ran_s=message["ran_s"],
            at=time.strftime("%Y-%m-%d %H:%M:%S"),
            log=os.path.join(started.directory, "stderr.log"),
            stopped_at_ns=self._stopped_at_ns,
        )
