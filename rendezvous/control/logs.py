"""`ddpctl logs`: the output of the ranks, read by the agents from their own disks.

Each answer is bounded and names the places up to which it has read. The next question continues there, so nothing is
lost or shown twice if the connection breaks, or if another replica takes over the job.

With `-f`, each agent waits until there is more. In a job of many nodes, all are asked at intervals instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.control.asking import BadArgument, inquire, job_named
from rendezvous.control.formats import is_for_programs, show, warn, write
from rendezvous.control.log_lines import as_dict, lines_of, on_terminal, prefix
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import CannotAnswer, LogPieces, LogPlace, LogStream, LogsWanted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from rendezvous.control.service import Service
    from rendezvous.values.questions import FromConversation, LogPiece

_WAIT_S = 10.0  # of an agent, for more output
_NODES_THAT_WAIT = 16
_EVERY_S = 1.0
_AGAIN_S, _LOST_S = 0.5, 60.0  # after a failed call; until the command gives up


async def run(service: Service, arguments: argparse.Namespace) -> int:
    job = await job_named(service, arguments.job)
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
        return replace(first, since_s=self._arguments.since, tail=self._arguments.tail)

    async def _ask(self, wanted: LogsWanted, nodes: Sequence[str] = ()) -> list[tuple[str, FromConversation]]:
        ranks = self._ranks if not nodes else ()
        return await inquire(
            self._service, self._job, wanted, nodes=nodes, ranks=ranks, wait_s=5.0 + wanted.wait_s
        )

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
        if is_for_programs(output):
            for line in found:
                show(as_dict(line), output, compact=True)
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
