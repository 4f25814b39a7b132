"""The ranks of this node: starts them through the zygote, and reports an event when a rank ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher import error_boundary
from launcher.exchange import RankEnded
from launcher.failure.crash_text import modules_named
from launcher.failure.rank_facts import OomWatch, read_error_record
from launcher.failure.verdict import RankEnd, cause_of
from launcher.health import keyboard_wait, page, stacks
from launcher.health.guards import Continuation
from launcher.health.pages import Pages
from launcher.health.stacks import without_doubt
from launcher.output.lines import RankLabel
from launcher.ranks.worker_env import RankPlace, continued_env, rank_args, rank_env, resume_args
from launcher.ranks.zygote import Zygote, rank_argv
from launcher.settings.import_path import files_that_hide
from launcher.settings.spec import EntryKind, LaunchSpec
from launcher.template.contracts import SAVED_STATE
from launcher.template.messages import CANNOT_START, Exited, Spawn, Started
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import RankPhase, RankView, Repeat
from rendezvous.values.types import Assignment, Cause, FailureClass, SavedState, StoreAddress

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.output.logs import LogPump

_CLOCK = "%Y-%m-%d %H:%M:%S"
_LAST_OUTPUT_S = 5.0  # to read what a failed rank wrote just before it ended: at once, but on a busy machine


@dataclass(frozen=True, slots=True)
class _Started:
    label: RankLabel
    directory: str
    pid: int = 0
    at: float = 0.0  # on the monotonic clock


@dataclass(frozen=True, slots=True)
class _Stop:
    """What the launcher asked a rank to do, and when on the monotonic clock: to end or, without a signal, to pause."""

    signum: int
    at: float


class Workers:
    def __init__(
        self,
        spec: LaunchSpec,
        logs: LogPump,
        boundary: ErrorBoundary,
        host: str,
        cpus: tuple[tuple[int, ...], ...],
        scratch: str,
    ) -> None:
        self._spec = spec
        self._scratch = scratch
        self._logs, self._boundary = logs, boundary
        self._host = host
        self._cpus = cpus
        self._oom = OomWatch()
        self.pages = Pages(trace_collectives=spec.trace_collectives)
        self.env_for_guards: Callable[[str, str], dict[str, str]] = lambda _directory, _scratch: {}
        self.starts: dict[int, int] = {}  # how often this agent has started each rank
        self._live: dict[int, _Started] = {}
        self.store_port = 0  # of this generation
        self._began = 0.0  # this generation, here; on the monotonic clock
        self._stops: dict[int, _Stop] = {}

    def carry_over(
        self, assignment: Assignment, store: StoreAddress, kept: Iterable[int]
    ) -> list[Continuation]:
        """Move parked ranks to another generation. One that has just ended is left out: its report is on its way.

        They keep process, page, streams and log folder. An older error file must not explain a later end.
        """
        moves: list[Continuation] = []
        for local_rank in kept:
            started = self._live.get(local_rank)
            if started is None:
                continue
            label = self._label(assignment, local_rank)
            place = RankPlace(assignment, local_rank, store, started.directory, self._scratch)
            env = continued_env(self._spec, place, os.environ)
            moves.append(Continuation(local_rank, started.label, label, env))
            self._live[local_rank] = replace(started, label=label)
            self._stops.pop(local_rank, None)
            self.pages.renumber(local_rank, label.rank)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(started.directory, "error.json"))
        self._logs.carry_over([(move.before, move.after) for move in moves])
        return moves

    def start(
        self, zygote: Zygote, assignment: Assignment, store: StoreAddress, kept: Container[int] = ()
    ) -> list[RankEnded]:
        """Start the ranks that are not kept. Return a `RankEnded` for each rank that could not be started."""
        not_started: list[RankEnded] = []
        self._began, self.store_port = time.monotonic(), store.port
        for local_rank in range(assignment.nproc):
            if local_rank in kept:
                continue
            self._stops.pop(local_rank, None)
            label = self._label(assignment, local_rank)
            place = RankPlace(assignment, local_rank, store, self._logs.rank_directory(label), self._scratch)
            self._live[local_rank] = _Started(label, place.directory)
            self.starts[label.rank] = self.starts.get(label.rank, 0) + 1
            try:
                path = assignment.resume_path or kept_path(self._spec.resume_file)
                fds = self._logs.open_rank(label)
            except ValueError as error:
                not_started.append(self._end_lost(local_rank, str(error)))
                continue
            except OSError as error:
                not_started.append(self._end_lost(local_rank, _cannot_open(error)))
                continue
            place = replace(place, assignment=replace(assignment, resume_path=path))
            zygote.spawn(self._order(place), fds)
        return not_started

    def _label(self, assignment: Assignment, local_rank: int) -> RankLabel:
        rank = assignment.rank_offset + local_rank
        return RankLabel(self._host, rank, local_rank, assignment.role, assignment.generation)

    def _order(self, place: RankPlace) -> Spawn:
        entry = self._spec.entry
        args = rank_args(entry.args, place.local_rank)
        args += resume_args(self._spec.resume_arg, place.assignment.resume_path)
        return Spawn(
            local_rank=place.local_rank,
            generation=place.assignment.generation,
            argv=rank_argv(entry, self._spec.python, args),
            args=args if args != entry.args else None,
            env=self._env(place),
            cpus=self._cpus[place.local_rank] if self._cpus else (),
            has_group=entry.kind is EntryKind.PROGRAM,
            is_store_kept=place.store.kept,
            is_python=entry.kind is not EntryKind.PROGRAM,
        )

    def _env(self, place: RankPlace) -> dict[str, str]:
        repeat = Repeat(place.assignment.repeat_steps, place.assignment.repeat_up_to)
        page = self.pages.open(place.local_rank, place.rank, repeat)
        return (
            rank_env(self._spec, place, os.environ)
            | page
            | self.env_for_guards(place.directory, place.scratch)
        )

    def folders(self) -> dict[int, str]:
        """Return the log folders of the ranks that still run, by global rank."""
        return {started.label.rank: started.directory for started in self._live.values()}

    def saved(self, generation: int) -> SavedState | None:
        """Return what a rank of this node has saved after the failure of the generation (`ddp.on_failure`)."""
        try:
            with open(f"{self._scratch}/{SAVED_STATE}{generation}", encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            return None
        return SavedState(int(found["step"]), str(found["path"]))

    def local_rank_of(self, rank: int, generation: int) -> int | None:
        """Return the local rank if that rank still runs."""
        labels = (started.label for started in self._live.values())
        return next(
            (each.local_rank for each in labels if (each.rank, each.generation) == (rank, generation)), None
        )

    def waiting_for_input(self, prompting: Container[int]) -> list[int]:
        """Return the global ranks that wait for a person to type. `prompting`: those that show a prompt."""
        if not keyboard_wait.someone_may_type():
            return []
        started = [each for each in self._live.values() if each.pid]
        return [
            each.label.rank
            for each in started
            if keyboard_wait.waits_for_input(each.pid, each.label.rank in prompting)
        ]

    def input_wait(self, rank: int) -> int | None:
        """Whether a rank that shows a prompt waits for the answer: 0 if not, None if unknown. For any thread.

        The number stays the same as long as it waits for the same answer.
        """
        pid = next((each.pid for each in list(self._live.values()) if each.label.rank == rank), 0)
        waits = keyboard_wait.waits_for_input(pid, shows_prompt=True) if pid else None
        return 1 + keyboard_wait.times_woken(pid) if waits else None if waits is None else 0

    def pid_of(self, rank: int) -> int:
        """0 if the rank does not run on this node."""
        return next((each.pid for each in self._live.values() if each.label.rank == rank), 0)

    def pids(self, only: Container[int] | None = None) -> list[int]:
        """Return the processes of these local ranks, or of all."""
        live = self._live.items()
        return [each.pid for local, each in live if each.pid and (only is None or local in only)]

    def ranks(self) -> list[int]:
        """Return the global ranks that still run."""
        return [started.label.rank for started in self._live.values()]

    def note_started(self, report: Started) -> None:
        started = self._live.get(report.local_rank)
        if started is not None and started.label.generation == report.generation:
            self._live[report.local_rank] = replace(started, pid=report.pid, at=time.monotonic())
            self.pages.started(report.local_rank, report.pid)

    async def with_stacks(self, cause: Cause) -> Cause:
        """Add the rank's current stacks to the cause, and write it to the rank's log folder."""
        started = self._live.get(cause.local_rank)
        where = await stacks.stacks_of(started.pid) if started is not None and started.pid else "it has ended"
        text = f"{where}\n\n{cause.traceback}" if cause.traceback else where
        cause = replace(without_doubt(cause, where), traceback=text, at=time.strftime(_CLOCK))
        return cause if started is None else _on_disk(started, cause)

    async def facts_of(self, local_rank: int) -> RankEnd | None:
        """Collect what is known about a rank that still runs, with the last lines on its stderr."""
        started = self._live.get(local_rank)
        if started is None:
            return None
        await self._read_last_output(started.label)
        view = self.pages.view(local_rank)
        label = started.label
        return RankEnd(
            node=self._host,
            rank=label.rank,
            local_rank=local_rank,
            exit_code=None,
            stderr_tail=self._logs.stderr_tail(label.rank, label.generation).decode(errors="replace"),
            ran_s=time.monotonic() - started.at,
            at=time.strftime(_CLOCK),
            log=os.path.join(started.directory, "stderr.log"),
            step=view.step or None if view else None,
            place=page.in_words(view) if view else "",
        )

    def note_stop(self, signum: int = 0, only: Iterable[int] | None = None) -> None:
        """Note that the launcher signals or pauses (0) these local ranks, or all. The first time counts."""
        for local_rank in self._live if only is None else only:
            before = self._stops.get(local_rank)
            self._stops[local_rank] = _Stop(signum, before.at if before else time.monotonic())

    async def ended(self, report: Exited) -> RankEnded:
        local_rank = report.local_rank
        if report.obstacle:
            return self._end_lost(local_rank, report.obstacle)
        started = self._live.pop(local_rank)
        last = self.pages.ended(local_rank)
        if report.exit_code == 0:
            return RankEnded(started.label.generation, local_rank, None)
        end = self._plain_end(
            started, report, last
        )  # before the wait: a stop that comes now did not end this rank
        await self._read_last_output(started.label)
        cause = self._boundary.called(
            "finding the cause of a rank's failure",
            lambda: cause_of(self._full_end(end, started, report.pid)),
            cause_of(end),
        )
        return RankEnded(started.label.generation, local_rank, cause)

    async def _read_last_output(self, label: RankLabel) -> None:
        """Read the last output of the rank, which may still be in its pipes."""
        read = asyncio.Event()
        tell = partial(error_boundary.call_in, asyncio.get_running_loop(), read.set)
        self._logs.catch_up(label.rank, label.generation, tell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_S):
                await read.wait()

    def lost_with_zygote(self, reason: str) -> list[RankEnded]:
        """Report all ranks as ended with the zygote. The loss of the zygote is the cause for all of them."""
        return [self._end_lost(local_rank, reason, 128 + signal.SIGKILL) for local_rank in list(self._live)]

    def _end_lost(self, local_rank: int, reason: str, exit_code: int = CANNOT_START) -> RankEnded:
        started = self._live.pop(local_rank)
        cause = Cause(
            node=self._host,
            rank=started.label.rank,
            local_rank=local_rank,
            failure=FailureClass.SIGNAL if exit_code > 128 else FailureClass.EXIT_CODE,
            reason=reason,
            exit_code=exit_code,
            at=time.strftime(_CLOCK),
            log=os.path.join(started.directory, "stderr.log"),
        )
        return RankEnded(started.label.generation, local_rank, cause)

    def _plain_end(self, started: _Started, report: Exited, last: RankView | None) -> RankEnd:
        """Collect what is known without reading the rank's own output.

        The times of all ranks of a node count from the same moment: they show which one ended first.
        """
        label = started.label
        stop = self._stops.get(label.local_rank)
        ended_at = exited_at = report.at
        if last is not None and last.known and last.phase is RankPhase.EXITING:
            exited_at = min(ended_at, time.monotonic() - last.phase_s)
        return RankEnd(
            node=self._host,
            rank=label.rank,
            local_rank=label.local_rank,
            exit_code=report.exit_code,
            signal=report.signum,
            stopped_by_us=report.told if stop is not None and stop.signum else 0,
            is_paused=stop is not None and not stop.signum and stop.at < ended_at,
            was_exiting=stop is not None and exited_at < min(stop.at, ended_at),
            uncaught=_ended_uncaught(last),
            ran_s=exited_at - self._began,
            ran_to_end_s=ended_at - self._began,
            at=time.strftime(_CLOCK),
            log=os.path.join(started.directory, "stderr.log"),
            step=last.step or None if last else None,
            place=page.in_words(last) if last else "",
        )

    def _full_end(self, end: RankEnd, started: _Started, pid: int) -> RankEnd:
        label = started.label
        killed = end.signal == signal.SIGKILL and end.stopped_by_us != signal.SIGKILL
        tail = self._logs.stderr_tail(label.rank, label.generation).decode(errors="replace")
        record = read_error_record(os.path.join(started.directory, "error.json"))
        names = modules_named(f"{record.traceback}\n{record.message}" if record else tail)
        return replace(
            end,
            stderr_tail=tail,
            error_record=record,
            oom_killed=self._oom.killed(pid) if killed else None,
            hiding=files_that_hide(names, self._spec.entry, os.environ) if names else {},
        )


def _on_disk(started: _Started, cause: Cause) -> Cause:
    log = os.path.join(started.directory, "stacks.txt")
    with contextlib.suppress(OSError), open(log, "w") as file:  # a full disk must not hide the reason
        file.write(f"{cause.reason}\n\n{cause.traceback}\n")
    return replace(cause, log=log, ran_s=time.monotonic() - started.at)


def kept_path(file: str) -> str:
    """Return the path that ranks of an earlier job have left in `--resume-file`, or ""."""
    if not file:
        return ""
    try:
        with open(file, encoding="utf-8") as opened:
            return str(json.load(opened)["path"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"cannot read --resume-file {file!r}: {error}. Use a file that only ddp-launch writes, or remove this one"
        ) from error


def _cannot_open(error: OSError) -> str:
    hint = "; raise the limit on open files (ulimit -n)" if error.errno == errno.EMFILE else ""
    return f"the rank's pipes cannot be made: {error.strerror}{hint}"


def _ended_uncaught(last: RankView | None) -> bool | None:
    """Whether an exception that nothing caught has ended the rank. None: unknown, as without a mark at its exit."""
    if last is None or not last.known or (last.phase is not RankPhase.EXITING and not last.totals.uncaught):
        return None
    return last.totals.uncaught
