"""The commands of ddpctl: each is one call to the replica that owns the job, or several."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from io import BufferedWriter
from typing import Any, assert_never

import grpc
import grpc.aio

import _ddp_launch_entry as doors
from rendezvous.control import why
from rendezvous.control.commands import TAIL, Command, Order, command_of
from rendezvous.control.ctl_text import (
    event_line,
    finished_hint,
    job_dict,
    job_table,
    job_text,
    line_as_dict,
    lines_of,
    named,
    on_terminal,
    phase_of,
    prefix,
    printable_lines,
)
from rendezvous.control.formats import JSON, as_dict, is_for_programs, show, warn, write
from rendezvous.control.service import BadArgument, Service, inquire, job_named
from rendezvous.control.top_table import (
    NodeUse,
    RankRow,
    Sorting,
    Spent,
    TableHead,
    View,
    keys_in,
    pressed,
    rows_of,
    screen,
    summary,
    table,
)
from rendezvous.grpc_io import reason_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.error_codes import Code
from rendezvous.values.questions import (
    LOGS_ARE_IN,
    CannotAnswer,
    Checkpointed,
    CheckpointWanted,
    Drilled,
    DrillWanted,
    FromConversation,
    LogPiece,
    LogPieces,
    LogPlace,
    LogStream,
    LogsWanted,
    ProfileWanted,
    RanksSeen,
    RanksWanted,
    Stacks,
    StacksWanted,
    TracePart,
    TraceWanted,
    Wanted,
)


async def carry_out(service: Service, arguments: argparse.Namespace) -> int:
    command, output = command_of(arguments), arguments.output
    for_programs = is_for_programs(output)
    match command:
        case Command.LIST:
            await _list(service, arguments)
        case Command.GET:
            show(job_dict(await _job(service, arguments)), output if for_programs else JSON)
        case Command.STATUS:
            job = await _job(service, arguments)
            show(job_dict(job) if for_programs else job_text(job), output)
        case Command.EVENTS | Command.WATCH:
            name = await job_named(service, arguments.job, ended_too=True)
            async for note in service.notes(name, follow=command is Command.WATCH):
                show(as_dict(note) if for_programs else event_line(note), output, compact=True)
        case Command.TOP:
            return await run(service, arguments)
        case Command.LOGS:
            return await show_logs(service, arguments)
        case Command.STACKS:
            return await show_stacks(service, arguments)
        case Command.WHY:
            return await why.run(service, arguments)
        case Command.CHECKPOINT:
            return await checkpoint(service, arguments)
        case Command.PROFILE:
            return await profile(service, arguments)
        case Command.DRILL:
            return await drill(service, arguments)
        case Command.DRAIN | Command.RESUME | Command.RESIZE | Command.RESTART | Command.ABORT:
            await _give(service, command, arguments)
        case _:
            assert_never(command)
    return 0


async def _list(service: Service, arguments: argparse.Namespace) -> None:
    if arguments.all:
        service.finished()  # raises `WingMissing`
    jobs = await service.all_jobs(may_be_none=True)
    listed = jobs if arguments.all else [job for job in jobs if job.phase != pb.PHASE_ENDED]
    if is_for_programs(arguments.output):
        show({"jobs": [as_dict(job) for job in listed]}, arguments.output)
        return
    hint = finished_hint(len(jobs) - len(listed))
    show("\n".join(filter(None, (job_table(listed), hint))), arguments.output)


async def _job(service: Service, arguments: argparse.Namespace) -> Any:
    name = await job_named(service, arguments.job, ended_too=True)
    return (await service.call("GetJob", pb.GetJobRequest(job_id=name))).job


async def _give(service: Service, order: Order, arguments: argparse.Namespace) -> None:
    arguments.job = await job_named(service, arguments.job)
    words = await _warn_not_drained(service, arguments) if order is Command.RESUME else ""
    job = (await service.call(*request_of(order, arguments))).job
    show(as_dict(job) if is_for_programs(arguments.output) else job_table([job]), arguments.output)
    if order is Command.DRAIN:
        words = await _warn_unknown_node(service, arguments)
    if words:
        warn(words)


async def _warn_unknown_node(service: Service, arguments: argparse.Namespace) -> str:
    """Warn if the job has no such node now. The name may be that of a node that joins later, or be misspelt."""
    node, job = arguments.node, arguments.job
    here = [each.node for each in await _nodes_of(job, service) if each.present]
    if node in here:
        return ""
    return (
        f"job {job} has no node {node} now (its nodes: {named(here)}). If a node of that name joins later, it will be "
        f"excluded until `ddpctl resume {job} {node}`."
    )


async def _warn_not_drained(service: Service, arguments: argparse.Namespace) -> str:
    try:
        out = [each.node for each in await _nodes_of(arguments.job, service) if each.excluded]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise  # the order would fail in the same way
        return ""  # the order itself reports that the job does not exist
    if arguments.node in out:
        return ""
    problem = f"node {arguments.node} of job {arguments.job} is not drained (drained or excluded nodes: {named(out)})"
    return f"{problem}, so there is nothing to resume"


async def _nodes_of(job: str, service: Service) -> list[Any]:
    return list((await service.call("GetJob", pb.GetJobRequest(job_id=job))).job.nodes)


def request_of(order: Order, arguments: argparse.Namespace) -> tuple[str, Any]:
    """The method of the service, and its request."""
    job = arguments.job
    match order:
        case Command.DRAIN:
            return "DrainNode", pb.DrainNodeRequest(job_id=job, node=arguments.node, reason=arguments.reason)
        case Command.RESUME:
            return "ResumeNode", pb.ResumeNodeRequest(job_id=job, node=arguments.node)
        case Command.RESIZE:
            few, many = arguments.nodes
            return "ResizeJob", pb.ResizeJobRequest(job_id=job, min_nodes=few, max_nodes=many)
        case Command.RESTART:
            return "RestartJob", pb.RestartJobRequest(job_id=job, reason=arguments.reason)
        case Command.ABORT:
            return "AbortJob", pb.AbortJobRequest(job_id=job, reason=arguments.reason)
        case _:
            assert_never(order)


# --- commands of ddpctl that make ranks do something: `checkpoint`, `profile` and `drill` -----------

_MORE_S = 5.0  # than the agent waits
_PROFILE_MORE_S = 70.0  # for the step that the rank is in, and for writing the file


async def checkpoint(service: Service, arguments: argparse.Namespace) -> int:
    job = await job_named(service, arguments.job)
    wanted = CheckpointWanted(arguments.reason or "requested with ddpctl", arguments.wait)
    answers = await inquire(service, job, wanted, wait_s=arguments.wait + _MORE_S)
    missing = 0
    found = []
    for node, told in answers:
        if isinstance(told, Checkpointed) and told.taken:
            found.append({"node": node, **asdict(told)})
            continue
        missing += 1
        late = f"not all ranks have taken the checkpoint within {arguments.wait:g} s"
        reason = told.reason if isinstance(told, CannotAnswer) else late
        warn(f"node {node}: {reason}", Code.NOT_POSSIBLE_NOW)
    if is_for_programs(arguments.output):
        show({"job_id": job, "taken": not missing, "nodes": found}, arguments.output)
    elif not missing:
        slowest = max((each["took_s"] for each in found), default=0.0)
        show(f"job {job}: all ranks have taken a checkpoint, after {slowest:.1f} s", arguments.output)
    return 1 if missing else 0


@contextmanager
def _unfinished(path: str) -> Iterator[BufferedWriter]:
    """A file beside `path`, which is removed unless it is renamed."""
    partial = f"{path}.part"
    try:
        with open(partial, "wb") as file:
            yield file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


async def profile(service: Service, arguments: argparse.Namespace) -> int:
    job, rank = await job_named(service, arguments.job), arguments.rank
    path = arguments.out or f"{re.sub(r'[^A-Za-z0-9._-]', '_', job)}-rank{rank}.trace.json.gz"
    with _unfinished(path) as file:  # before the rank is asked: the folder may not be writable
        wait_s = arguments.seconds + _PROFILE_MORE_S
        told = await _only_answer(service, job, rank, ProfileWanted(rank, arguments.seconds), wait_s)
        while isinstance(told, TracePart):
            file.write(told.data)
            if file.tell() >= told.size or not told.data:
                file.flush()
                os.replace(file.name, path)
                break
            told = await _only_answer(service, job, rank, TraceWanted(rank, told.name, file.tell()), _MORE_S)
    if not isinstance(told, TracePart):
        other = "the agent gave an answer to another question"
        warn(told.reason if isinstance(told, CannotAnswer) else other, Code.NOT_POSSIBLE_NOW)
        return 1
    if is_for_programs(arguments.output):
        show(
            {"job_id": job, "rank": rank, "file": path, "bytes": told.size, "steps": told.steps},
            arguments.output,
        )
    else:
        size = f"{told.steps} steps, {told.size / 1e6:.1f} MB"
        show(f"rank {rank}: {path} ({size}); open it at https://ui.perfetto.dev", arguments.output)
    return 0


async def drill(service: Service, arguments: argparse.Namespace) -> int:
    freezes, rank = arguments.deed == "freeze", arguments.rank
    if arguments.freeze_s and not freezes:
        raise BadArgument("--for goes with freeze only", code=Code.CONTRADICTING_OPTIONS)
    if not arguments.yes and not sys.stdin.isatty():
        words = "a drill harms the job, and nobody can be asked here: add --yes"
        raise BadArgument(words, code=Code.INVALID_COMMAND_LINE)
    name = await job_named(service, arguments.job)
    job = (await service.call("GetJob", pb.GetJobRequest(job_id=name))).job.summary
    what = f"{arguments.deed} rank {rank} of job {name} ({job.world_size} ranks, generation {job.generation})"
    if not arguments.yes and not await _confirmed(what):
        warn("nothing was done")
        return 1
    freeze_s = (arguments.freeze_s or 10.0) if freezes else 0.0
    wanted = DrillWanted(rank, job.generation, freeze_s, arguments.reason)
    ((node, told),) = await inquire(service, name, wanted, ranks=[rank])
    if isinstance(told, CannotAnswer):
        warn(f"node {node}: {told.reason}", Code.NOT_POSSIBLE_NOW)
        return 1
    assert isinstance(told, Drilled)
    found = {"job_id": name, "rank": rank, "node": node, "pid": told.pid, "freeze_s": freeze_s}
    done = f"{what}: done, pid {told.pid} on {printable_lines(node)}"
    show(found if is_for_programs(arguments.output) else done, arguments.output)
    return 0


async def _confirmed(what: str) -> bool:
    sys.stderr.write(f"{what}? [y/N] ")
    sys.stderr.flush()
    typed = asyncio.Event()
    asyncio.get_running_loop().add_reader(
        sys.stdin.fileno(), typed.set
    )  # a plain read would not end at Ctrl-C
    await typed.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _only_answer(
    service: Service, job: str, rank: int, wanted: Wanted, wait_s: float
) -> FromConversation:
    ((_, told),) = await inquire(service, job, wanted, ranks=[rank], wait_s=wait_s)
    return told


# --- `ddpctl logs`: the output of the ranks, read by the agents from their own disks ----------------
#
# Each answer is bounded and names the places up to which it has read. The next question continues there, so nothing is
# lost or shown twice if the connection breaks, or if another replica takes over the job.
#
# With `-f`, each agent waits until there is more. In a job of many nodes, all are asked at intervals instead.

_WAIT_S = 10.0  # of an agent, for more output
_NODES_THAT_WAIT = 16
_EVERY_S = 1.0
_EVER_S = 1e8
_AGAIN_S, _LOST_S = 0.5, 60.0  # after a failed call; until the command gives up


async def show_logs(service: Service, arguments: argparse.Namespace) -> int:
    job = await job_named(service, arguments.job, ended_too=True)
    reader = _Reader(service, job, arguments)
    try:
        await reader.read_all()
        if arguments.follow:
            await reader.follow()
    finally:
        reader.save()
    return reader.code


class _Reader:
    def __init__(self, service: Service, job: str, arguments: argparse.Namespace) -> None:
        self._service, self._job, self._arguments = service, job, arguments
        self._ranks: Sequence[int] = arguments.rank
        self._grep = arguments.grep
        self._is_terminal = sys.stdout.isatty()
        self._color = self._is_terminal and not os.environ.get("NO_COLOR")
        self._places = _read_cursor(arguments.cursor_file, job) if arguments.cursor_file else {}
        self._silent: dict[str, str] = {}  # by node: why it does not answer
        self._ended: set[str] = set()
        self._has_begun = False
        self.code = 0

    def _wanted(self, wait_s: float = 0.0) -> LogsWanted:
        places = tuple(LogPlace(g, r, LogStream(s), at) for (g, r, s), at in self._places.items())
        first = LogsWanted(tuple(self._ranks), self._arguments.generation, wait_s=wait_s)
        if places or self._has_begun:  # what comes after the first look is all new
            return replace(first, places=places)
        tail, since_s = self._arguments.tail, self._arguments.since
        if self._grep is not None and tail is None and since_s is None and not self._arguments.generation:
            since_s = _EVER_S
        return replace(first, since_s=since_s, tail=TAIL if tail is None else tail)

    async def _ask(self, wanted: LogsWanted, nodes: Sequence[str] = ()) -> list[tuple[str, FromConversation]]:
        ranks = self._ranks if not nodes else ()
        try:
            return await inquire(
                self._service, self._job, wanted, nodes=nodes, ranks=ranks, wait_s=5.0 + wanted.wait_s
            )
        except grpc.aio.AioRpcError as error:
            answers = (
                []
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION
                else await self._in_files(wanted)
            )
            if not answers:
                raise
            return answers

    async def _in_files(self, wanted: LogsWanted) -> list[tuple[str, FromConversation]]:
        """Of a job whose agents are gone: from the folders that they have named, if they are here as well."""
        if await self._nodes() is not None:
            return []
        wing = doors.find(doors.HISTORY, "files")
        notes = [note async for note in self._service.notes(self._job, follow=False) if note.kind == "logs"]
        nodes = {note.text.removeprefix(LOGS_ARE_IN): note.node for note in reversed(notes)}
        return [(node, await wing.logs_in(folder, wanted)) for folder, node in nodes.items()]

    async def read_all(self) -> None:
        """What there is now. A long output needs several questions; places of later ones include all streams."""
        while self._take(await self._ask(self._wanted())):
            pass
        self._has_begun = True
        if self._silent and not self._places:
            self.code = 1

    async def follow(self) -> None:
        """Until the job ends. After a failed call, try again for a while, from the same places."""
        loop = asyncio.get_running_loop()
        failed_since: float | None = None
        while True:
            try:
                nodes = await self._nodes()
                if nodes is None:
                    return
                if len(nodes) <= _NODES_THAT_WAIT:
                    await self._wait_on(nodes)
                else:
                    self._take(await self._ask(self._wanted()))
                    await asyncio.sleep(_EVERY_S)
                failed_since = None
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    await asyncio.sleep(_AGAIN_S)
                    continue  # it has ended, or has no ranks yet: the next look at its nodes tells
                failed_since = failed_since or loop.time()
                passing = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if not passing or loop.time() - failed_since > _LOST_S:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _nodes(self) -> list[str] | None:
        """The nodes that may have output; None if the job has ended."""
        job = (await self._service.call("GetJob", pb.GetJobRequest(job_id=self._job))).job
        if job.summary.phase == pb.PHASE_ENDED:
            return None
        placed = [node for node in job.nodes if node.HasField("node_rank") and node.present]
        mine = [
            node.node
            for node in placed
            if not self._ranks
            or any(node.rank_offset <= rank < node.rank_offset + node.nproc for rank in self._ranks)
        ]
        left = [node for node in mine if node not in self._ended]
        if not left:
            await asyncio.sleep(_AGAIN_S)
        return left

    async def _wait_on(self, nodes: Sequence[str]) -> None:
        """Ask each node until the nodes may have changed."""

        loop = asyncio.get_running_loop()
        until = loop.time() + _WAIT_S

        async def one(node: str) -> None:
            while node not in self._ended and (left_s := until - loop.time()) > 0:
                self._take(await self._ask(self._wanted(left_s), [node]))
                if node in self._silent:
                    await asyncio.sleep(_AGAIN_S)

        tasks = [asyncio.create_task(one(node)) for node in nodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, answers: Iterable[tuple[str, FromConversation]]) -> bool:
        """Print, and note the places. Return whether there is more at once."""
        pieces: list[tuple[str, LogPiece]] = []
        more = False
        for node, told in answers:
            if isinstance(told, CannotAnswer):
                if self._silent.get(node) != told.reason:
                    warn(f"node {node}: {told.reason}")
                self._silent[node] = told.reason
                continue
            assert isinstance(told, LogPieces)
            self._silent.pop(node, None)
            more = more or told.more
            if told.ended:
                self._ended.add(node)
            pieces += [(node, piece) for piece in told.pieces]
            self._places |= {(p.generation, p.rank, str(p.stream)): p.offset for p in told.places}
        self._print(pieces)
        return more

    def _print(self, pieces: list[tuple[str, LogPiece]]) -> None:
        output, wanted = self._arguments.output, self._arguments.stream
        found = [line for line in lines_of(pieces) if wanted in ("", str(line.stream))]
        if self._grep is not None:
            found = [line for line in found if self._grep.search(line.text)]
        if is_for_programs(output):
            for line in found:
                show(line_as_dict(line), output, compact=True)
            return
        rows = []
        for line in found:
            text = on_terminal(line.text, color=self._color) if self._is_terminal else line.text
            rows.append(text if self._arguments.no_prefix else prefix(line) + text)
        if rows:
            write("\n".join(rows) + "\n")

    def save(self) -> None:
        path = self._arguments.cursor_file
        if path:
            places = [[g, r, s, at] for (g, r, s), at in sorted(self._places.items())]
            part = f"{path}.part"
            with open(part, "w", encoding="utf-8") as file:
                json.dump({"version": 1, "job": self._job, "places": places}, file)
            os.replace(part, path)


def _read_cursor(path: str, job: str) -> dict[tuple[int, int, str], int]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    with suppress(ValueError, KeyError, TypeError):
        found: Any = json.loads(text)
        if found["version"] == 1:
            if found["job"] != job:
                raise BadArgument(
                    f"{path} is the cursor of job {found['job']}, not of {job}: use another file"
                )
            return {(int(g), int(r), str(LogStream(s))): int(at) for g, r, s, at in found["places"]}
    raise BadArgument(f"{path} is not a cursor file of `ddpctl logs`: use another name, or remove it")


# --- `ddpctl stacks`: the stacks of one rank, as they are now ---------------------------------------

_STACKS_WAIT_S, _NATIVE_WAIT_S = 8.0, 60.0  # gdb reads the symbols of torch


async def show_stacks(service: Service, arguments: argparse.Namespace) -> int:
    job, rank = await job_named(service, arguments.job), arguments.rank
    wait_s = _NATIVE_WAIT_S if arguments.native else _STACKS_WAIT_S
    wanted = StacksWanted(rank, arguments.native)
    ((node, told),) = await inquire(service, job, wanted, ranks=[rank], wait_s=wait_s)
    if isinstance(told, CannotAnswer):
        warn(f"node {node}: {told.reason}", Code.NOT_POSSIBLE_NOW)
        return 1
    assert isinstance(told, Stacks)
    if is_for_programs(arguments.output):
        show({"job_id": job, "rank": rank, "node": node, "text": told.text}, arguments.output)
    else:
        show(f"rank {rank} on {printable_lines(node)}\n\n{printable_lines(told.text)}", arguments.output)
    return 0


# --- `ddpctl top`: what each rank does. On a terminal a live table; otherwise one table -------------
#
# The screen uses only what every terminal knows, also over ssh: the alternate screen, moving to the first row, and
# clearing to the end of a line. It is drawn in one write.

_TOP_WAIT_S = 3.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


async def run(service: Service, arguments: argparse.Namespace) -> int:
    job = await job_named(service, arguments.job, ended_too=True)
    source = _Source(service, job)
    sorting = Sorting(arguments.sort, arguments.reverse)
    is_live = sys.stdout.isatty() and sys.stdin.isatty() and not arguments.once
    if is_live and not is_for_programs(arguments.output):
        return await _Live(source, View(TableHead(job), sorting=sorting), arguments.interval).run()
    await source.look()
    if is_for_programs(arguments.output):
        show(source.as_dict(), arguments.output)
    else:
        width = shutil.get_terminal_size((160, 24)).columns
        head, rows = table(source.rows, sorting, width)
        write("\n".join([*summary(source.rows, source.head), *(["", head, *rows] if rows else [])]))
    for problem in source.head.problems:
        if is_for_programs(arguments.output):
            warn(problem)
    return 0 if source.rows or source.is_over else 1


class _Source:
    """The present state of the job and its ranks."""

    def __init__(self, service: Service, job: str) -> None:
        self._service, self._job = service, job
        self._spent: Spent = {}
        self.head = TableHead(job)
        self.rows: list[RankRow] = []
        self.node_use: NodeUse = {}
        self.is_over = False

    async def look(self) -> None:
        job = (await self._service.call("GetJob", pb.GetJobRequest(job_id=self._job))).job
        summary_now = job.summary
        self.is_over = summary_now.phase == pb.PHASE_ENDED
        self.head = TableHead(
            self._job, phase_of(summary_now), summary_now.generation, summary_now.nodes, summary_now.restarts
        )
        if self.is_over:
            more = f"it has ended: `ddpctl status {self._job}`, `why` and `logs` tell more"
            self.rows, self.head = [], replace(self.head, problems=(more,))
            return
        try:
            answers = await inquire(self._service, self._job, RanksWanted(), wait_s=_TOP_WAIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            self.rows = []
            self.head = replace(self.head, problems=(reason_of(error),))
            return
        seen = [(node, rank) for node, told in answers if isinstance(told, RanksSeen) for rank in told.ranks]
        self.rows, self._spent = rows_of([(printable_lines(node), rank) for node, rank in seen], self._spent)
        self.node_use = {
            printable_lines(node): {each.name: float(each.value) for each in told.node_use}
            for node, told in answers
            if isinstance(told, RanksSeen)
        }
        silent = [f"node {node}: {told.reason}" for node, told in answers if isinstance(told, CannotAnswer)]
        health = [f"node {n.node}: {text}" for n in job.nodes for text in n.health]
        self.head = replace(self.head, problems=tuple(printable_lines(text) for text in (*silent, *health)))

    def as_dict(self) -> dict[str, Any]:
        ranks = [{"node": row.node, **asdict(row.seen), "communication": row.share} for row in self.rows]
        head = {**asdict(self.head), "problems": list(self.head.problems)}
        return {**head, "ranks": ranks, "node_use": self.node_use}


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
                            self._view,
                            head=self._source.head,
                            rows=tuple(self._source.rows),
                            node_use=self._source.node_use,
                            note="",
                        )
                    except grpc.aio.AioRpcError as error:
                        if error.code() not in _PASSING:
                            raise
                        self._view = replace(self._view, note=f"no answer: {reason_of(error)}; trying again")
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
