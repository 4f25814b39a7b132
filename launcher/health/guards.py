"""The agent's side of the guards (monitor threads in the ranks): receives error reports and sends commands.

Each rank's guard (ddp/telemetry/guard.py) connects to one socket in the node's scratch folder and sends lines of
JSON. Only this user can access the folder. Only signals stop a rank without a guard.

A rank inside `ddp.elastic`'s `State.run` *heals*: its guard can pause it. Then the rank leaves its collectives, reports
that it is *parked*, and waits. It continues as a rank of a later generation, with the environment that the agent sends:

    rank -> agent   {"heals": bool}, also in the hello; {"parked": {"generation": g}}; {"cannot_heal": reason}
    agent -> rank   {"pause": {"generation": g, "reason": text}}; {"continue": {"generation": g, "env": {...}}}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from launcher.template import scratch
from launcher.template.contracts import GUARD
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.output.lines import RankLabel

_NAME = "guard"
_LONGEST_PATH = 107  # of a Unix socket
_LONGEST_LINE = 1 << 16
_SHOWN_CHARS = 500
_MOST_RANKS, _LONGEST_SPELLED = 1 << 24, 200


@dataclass(frozen=True, slots=True)
class Lost:
    """A guard's report of a failed collective, or of an asynchronous error of a process group."""

    rank: int
    generation: int
    text: str
    asynchronous: bool  # ranks that wait in the group may keep waiting
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A parked rank that continues: its labels in the two generations, and what changes in its environment."""

    local_rank: int
    before: RankLabel
    after: RankLabel
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Dumped:
    """A guard's reply: why it could not write the dump ("" if it did), and the rank's process groups."""

    problem: str
    groups: dict[str, tuple[int, str]]  # by name: how many ranks, and which ("0-3")


class GuardListener(Protocol):
    """The ranks are global ranks of the generation that is given."""

    def communication_failed(self, lost: Lost) -> None: ...
    def healing_changed(self, rank: int, generation: int, heals: bool) -> None: ...
    def parked(self, rank: int, generation: int) -> None: ...
    def cannot_heal(self, rank: int, generation: int, reason: str) -> None: ...


@dataclass(slots=True)
class _Line:
    """The connection of one guard."""

    writer: asyncio.StreamWriter
    key: tuple[int, int] | None = None  # generation and rank; None before its hello


class Guards:
    def __init__(self, folder: str, listener: GuardListener) -> None:
        self._folder = folder
        self._path = os.path.join(folder, _NAME)
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._lines: dict[tuple[int, int], _Line] = {}  # by generation and rank
        self._dumps: dict[tuple[int, int], asyncio.Future[Dumped]] = {}
        self._profiles: dict[tuple[int, int], asyncio.Future[tuple[str, int]]] = {}

    async def listen(self) -> None:
        """Open the socket. If that fails, ranks run without a guard."""
        if len(os.fsencode(self._path)) > _LONGEST_PATH:
            return
        with contextlib.suppress(OSError):
            scratch.ensure(self._folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            server = await asyncio.start_unix_server(self._serve, self._path, limit=_LONGEST_LINE)
            os.chmod(self._path, 0o600)
            self._server = server

    def env(self) -> dict[str, str]:
        return {GUARD: self._path} if self._server is not None else {}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for line in self._lines.values():
            line.writer.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    # --- commands --------------------------------------------------------------------------------------

    def abort_groups(self, generation: int, reason: str, among: Callable[[int], bool]) -> None:
        """Abort all process groups of the ranks of this node that are `among` those meant."""
        for (of, rank), line in self._lines.items():
            if of == generation and among(rank):
                _send(line.writer, {"abort": reason[:_SHOWN_CHARS]})

    def pause(self, generation: int, reason: str, among: Callable[[int], bool]) -> None:
        """Abort the process groups of these ranks, and let them park. A rank without a guard is killed later."""
        for (of, rank), line in self._lines.items():
            if of == generation and among(rank):
                _send(line.writer, {"pause": {"generation": generation, "reason": reason[:_SHOWN_CHARS]}})

    def carry_on(self, move: Continuation) -> bool:
        """Let a parked rank continue. Return False if its guard cannot be reached.

        The new generation counts from now on: the next command may come before the guard's new hello.
        """
        line = self._lines.pop((move.before.generation, move.before.rank), None)
        if line is None or line.writer.is_closing():
            return False
        line.key = (move.after.generation, move.after.rank)
        self._lines[line.key] = line
        _send(line.writer, {"continue": {"generation": move.after.generation, "env": move.env}})
        return True

    async def dump(self, generation: int, files: Mapping[int, str], within_s: float) -> dict[int, Dumped]:
        """Let each rank write its flight recorder into its file. Return the answers that arrived."""
        asked: dict[int, asyncio.Future[Dumped]] = {}
        for rank, file in files.items():
            line = self._lines.get((generation, rank))
            if line is not None:
                asked[rank] = self._dumps[generation, rank] = asyncio.get_running_loop().create_future()
                _send(line.writer, {"dump": file})
        if asked:
            await asyncio.wait(asked.values(), timeout=within_s)
        for rank in asked:
            self._dumps.pop((generation, rank), None)
        return {rank: answer.result() for rank, answer in asked.items() if answer.done()}

    async def profile(
        self, generation: int, rank: int, seconds: float, path: str, within_s: float
    ) -> tuple[str, int] | None:
        """Let a rank write a trace. Return why it did not ("" if it did) and its steps; None without a guard."""
        who = (generation, rank)
        line = self._lines.get(who)
        if line is None:
            return None
        if who in self._profiles:
            return "it is already being profiled", 0
        answer = self._profiles[who] = asyncio.get_running_loop().create_future()
        _send(line.writer, {"profile": {"seconds": seconds, "path": path}})
        try:
            return await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            _send(line.writer, {"profile": None})
            return f"it finished no optimizer step within {within_s:g} s", 0
        finally:
            del self._profiles[who]

    # --- reports ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Line(writer)
        try:
            while text := await reader.readline():
                self._on_report(line, json.loads(text))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            pass  # not a guard, or it ended in the middle of a line
        finally:
            if line.key is not None and self._lines.get(line.key) is line:
                del self._lines[line.key]
            writer.close()

    def _on_report(self, line: _Line, report: dict[str, Any]) -> None:
        if "hello" in report:
            self._on_hello(line, (int(report["generation"]), int(report["hello"])))
        if line.key is None:
            return
        generation, rank = line.key
        if "heals" in report:
            self._listener.healing_changed(rank, generation, bool(report["heals"]))
        if "parked" in report and int(report["parked"]["generation"]) == generation:
            self._listener.parked(rank, generation)
        if "cannot_heal" in report:
            self._listener.cannot_heal(rank, generation, str(report["cannot_heal"])[:_SHOWN_CHARS])
        if "error" in report:
            error = report["error"]
            text, peer = str(error.get("text", ""))[:_SHOWN_CHARS], error.get("peer")
            self._listener.communication_failed(
                Lost(
                    rank,
                    generation,
                    text,
                    error.get("doing") == "asynchronous error",
                    peer if isinstance(peer, int) else None,
                )
            )
        elif "profiled" in report:
            profiled = self._profiles.get((generation, rank))
            if profiled is not None and not profiled.done():
                profiled.set_result((str(report["profiled"])[:_SHOWN_CHARS], int(report["steps"])))
        elif "dumped" in report:
            answer = self._dumps.get(line.key)
            if answer is not None and not answer.done():
                answer.set_result(Dumped(str(report["dumped"]), _groups(report.get("groups", ()))))

    def _on_hello(self, line: _Line, key: tuple[int, int]) -> None:
        if line.key is not None and self._lines.get(line.key) is line:
            del self._lines[line.key]
        line.key = key
        self._lines[key] = line


def _groups(received: list[list[Any]]) -> dict[str, tuple[int, str]]:
    """Limit the sizes and texts of the groups to those of the message fields."""
    sane = [(str(name), min(max(int(size), 0), _MOST_RANKS), str(who)) for name, size, who in received]
    return {name: (size, who if len(who) <= _LONGEST_SPELLED else "") for name, size, who in sane}


def _send(writer: asyncio.StreamWriter, command: dict[str, Any]) -> None:
    """Send without waiting. If a guard does not read, its rank is killed at the end of the grace period."""
    if not writer.is_closing():
        writer.write(json.dumps(command).encode() + b"\n")
