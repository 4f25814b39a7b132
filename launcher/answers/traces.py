"""Traces of ranks by torch's profiler: requests them, and hands them out in parts."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import CannotAnswer, TracePart

if TYPE_CHECKING:
    from launcher.health.communication import CommunicationWatch
    from launcher.ranks.worker import Workers
    from rendezvous.values.questions import ProfileWanted, Told, TraceWanted

_PART_BYTES = 512 * 1024
_FIRST_STEP_S = 60.0  # until the rank has finished the step that it is in, and written the file
_MOST_S = 300.0


@dataclass(frozen=True, slots=True)
class _Trace:
    path: str
    steps: int


class Traces:
    def __init__(self, ranks: Workers, communication: CommunicationWatch) -> None:
        self._ranks, self._communication = ranks, communication
        self._known: dict[tuple[int, str], _Trace] = {}  # by rank and name

    async def record(self, wanted: ProfileWanted, generation: int) -> Told:
        folder = self._ranks.folders().get(wanted.rank)
        if folder is None:
            return CannotAnswer(f"rank {wanted.rank} does not run on this node now")
        if not 0 < wanted.seconds <= _MOST_S:
            return CannotAnswer(f"a profile takes at most {_MOST_S:g} s")
        name = f"trace-{len(self._known) + 1}.json.gz"
        path = os.path.join(folder, name)
        within_s = wanted.seconds + _FIRST_STEP_S
        done = await self._communication.profile(generation, wanted.rank, wanted.seconds, path, within_s)
        if done is None:
            return CannotAnswer(
                f"rank {wanted.rank} has no process group yet, so it cannot be asked; it has one after "
                "init_process_group"
            )
        problem, steps = done
        if problem:
            return CannotAnswer(f"rank {wanted.rank} was not profiled: {problem}")
        self._known[wanted.rank, name] = _Trace(path, steps)
        return await asyncio.to_thread(self._part, wanted.rank, name, 0)

    async def part(self, wanted: TraceWanted) -> Told:
        return await asyncio.to_thread(self._part, wanted.rank, wanted.name, wanted.offset)

    def _part(self, rank: int, name: str, offset: int) -> Told:
        trace = self._known.get((rank, name))
        if trace is None:
            return CannotAnswer(f"this agent has no trace {name} of rank {rank}")
        try:
            with open(trace.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), _PART_BYTES, max(0, offset))
        except OSError as error:
            return CannotAnswer(f"cannot read {trace.path}: {error.strerror}")
        return TracePart(name, size, offset, data, trace.steps)
