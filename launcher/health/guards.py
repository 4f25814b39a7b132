"""The agent's end of the guards: receives reports of failed communication, and sends orders.

Each rank's guard (ddp/telemetry/guard.py) connects to one socket in the node's scratch folder, which only this user
may enter, and sends lines of JSON. A rank without a guard is stopped by signals only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from launcher.template import scratch

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "DDP_GUARD"
_NAME = "guard"
_LONGEST_PATH = 107  # of a Unix socket
_LONGEST_LINE = 1 << 16
_SHOWN_CHARS = 500
_MOST_RANKS, _LONGEST_SPELLED = 1 << 24, 200


@dataclass(frozen=True, slots=True)
class Lost:
    """What a guard tells of a collective that failed, or of a group that reports an error by itself."""

    rank: int
    generation: int
    text: str
    asynchronous: bool  # ranks that wait for it may not have noticed, and keep waiting
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Dumped:
    """A guard's answer: whether its flight recorder is in the file, or why not, and the groups of the rank."""

    problem: str
    groups: dict[str, tuple[int, str]]  # by name: how many ranks, and which ("0-3")


class Listener(Protocol):
    def communication_failed(self, lost: Lost) -> None: ...


class Guards:
    def __init__(self, folder: str, listener: Listener) -> None:
        self._folder = folder
        self._path = os.path.join(folder, _NAME)
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._lines: dict[tuple[int, int], asyncio.StreamWriter] = {}  # by generation and rank
        self._dumps: dict[tuple[int, int], asyncio.Future[Dumped]] = {}

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
        return {VARIABLE: self._path} if self._server is not None else {}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._lines.values():
            writer.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    # --- orders --------------------------------------------------------------------------------------

    def abort_groups(self, generation: int, reason: str) -> None:
        """All groups of all ranks of this node."""
        for (of, _rank), writer in self._lines.items():
            if of == generation:
                _say(writer, {"abort": reason[:_SHOWN_CHARS]})

    async def dump(self, generation: int, files: Mapping[int, str], within_s: float) -> dict[int, Dumped]:
        """Let each rank write its flight recorder into its file. Return the answers that arrived."""
        asked: dict[int, asyncio.Future[Dumped]] = {}
        for rank, file in files.items():
            writer = self._lines.get((generation, rank))
            if writer is not None:
                asked[rank] = self._dumps[generation, rank] = asyncio.get_running_loop().create_future()
                _say(writer, {"dump": file})
        if asked:
            await asyncio.wait(asked.values(), timeout=within_s)
        for rank in asked:
            self._dumps.pop((generation, rank), None)
        return {rank: answer.result() for rank, answer in asked.items() if answer.done()}

    # --- what they tell ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who: tuple[int, int] | None = None
        try:
            while line := await reader.readline():
                said = json.loads(line)
                if "hello" in said:
                    who = (int(said["generation"]), int(said["hello"]))
                    self._lines[who] = writer
                elif who is not None:
                    self._told(who, said)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            pass  # not a guard, or one that ends in the middle of a word
        finally:
            if who is not None and self._lines.get(who) is writer:
                del self._lines[who]
            writer.close()

    def _told(self, who: tuple[int, int], said: dict[str, Any]) -> None:
        generation, rank = who
        if "error" in said:
            error = said["error"]
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
        elif "dumped" in said:
            answer = self._dumps.get(who)
            if answer is not None and not answer.done():
                answer.set_result(Dumped(str(said["dumped"]), _groups(said.get("groups", ()))))


def _groups(told: list[list[Any]]) -> dict[str, tuple[int, str]]:
    """Limit the groups to what a message can carry."""
    sane = [(str(name), min(max(int(size), 0), _MOST_RANKS), str(who)) for name, size, who in told]
    return {name: (size, who if len(who) <= _LONGEST_SPELLED else "") for name, size, who in sane}


def _say(writer: asyncio.StreamWriter, order: dict[str, str]) -> None:
    """Send without waiting. If a guard does not read, its rank is killed at the end of the grace period."""
    if not writer.is_closing():
        writer.write(json.dumps(order).encode() + b"\n")
