"""A job without a launcher whose ranks are healed in place: when one has died, the others keep their processes.

What the agent does is here as well: the store of each generation, and its side of the guards' socket.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from generations import FORK_SERVER, run_rank

from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_WITHIN_S = 120.0
needs_reset_of_fsdp = pytest.mark.skipif(
    torch_api.version() < torch_names.RESET_OF_FSDP.since,
    reason="FSDP2 of this torch cannot go on after a step that was interrupted",
)


@dataclass(eq=False)
class Rank:
    number: int
    process: Any
    line: socket.socket | None = None
    received: bytes = b""
    heals: bool = False
    parked: bool = False
    refusal: str = ""


@dataclass
class Job:
    """Plays a job to its end. `sizes`: the world sizes of the generations, if they change."""

    program: Path
    folder: Path
    sizes: list[int]
    env: Mapping[str, str]
    generation: int = 0
    ranks: list[Rank] = field(default_factory=list)
    pids: list[list[int]] = field(default_factory=list)  # by generation and rank
    codes: list[int] = field(default_factory=list)  # of all ranks that ended

    def play(self) -> None:
        scratch = self.folder / "scratch"
        scratch.mkdir(mode=0o700)
        self._path = str(self.folder / "guards")
        self._selector = selectors.DefaultSelector()
        self._give_up_at = time.monotonic() + _WITHIN_S
        with socket.socket(socket.AF_UNIX) as self._server:
            self._server.bind(self._path)
            self._server.listen(64)
            self._selector.register(self._server, selectors.EVENT_READ)
            try:
                self._begin()
                while self.ranks:
                    self._wait()
                    ended = [rank for rank in self.ranks if rank.process.exitcode is not None]
                    if any(rank.process.exitcode for rank in ended):
                        self._heal()
                    else:
                        self._reap(ended)
            finally:
                for rank in self.ranks:
                    rank.process.kill()
                    rank.process.join()
                self._selector.close()

    def _size(self) -> int:
        return self.sizes[min(self.generation, len(self.sizes)) - 1]

    def _world(self) -> dict[str, str]:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        size = str(self._size())
        return {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "DDP_GENERATION": str(self.generation),
        }

    def _begin(self) -> None:
        """Survivors go on; the places that nobody has get new processes."""
        self.generation += 1
        world = self._world()
        survivors = {rank.number: rank for rank in self.ranks}
        for number in range(self._size()):
            place = world | {"RANK": str(number), "LOCAL_RANK": str(number)}
            if number in survivors:
                survivors[number].parked = False
                order = {"generation": self.generation, "env": place}
                self._send(survivors[number], {"continue": order})
            else:
                self._start(number, place | ({"DDP_JOINS": "1"} if survivors else {}))
        self.ranks.sort(key=lambda rank: rank.number)
        self.pids.append([rank.process.pid for rank in self.ranks])

    def _start(self, number: int, place: dict[str, str]) -> None:
        fixed = {
            "DDP_SCRATCH": str(self.folder / "scratch"),
            "DDP_GUARD": self._path,
            "TORCHELASTIC_RUN_ID": self.folder.name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        said = str(self.folder / f"rank{number}")
        process = FORK_SERVER.Process(
            target=run_rank, args=(str(self.program), fixed | place | dict(self.env), said)
        )
        process.start()
        self.ranks.append(Rank(number, process))
        self._selector.register(process.sentinel, selectors.EVENT_READ)

    def _heal(self) -> None:
        """Pause all that live, and end those that cannot be healed; then begin the next generation."""
        while self._take(self._selector.select(0)):  # who has said before the death that it heals is healed
            pass
        for rank in self.ranks:
            if rank.heals:
                self._send(rank, {"pause": {"generation": self.generation, "reason": "rank N died"}})
            else:
                rank.process.kill()
        while not all(rank.parked or rank.process.exitcode is not None for rank in self.ranks):
            self._wait()
        left_over = [each for each in self.ranks if each.number >= self._size_next()]
        for rank in left_over:
            rank.process.kill()
            rank.process.join()
        self._reap([each for each in self.ranks if each in left_over or each.process.exitcode is not None])
        assert self.generation < 20, "it heals without end"
        self._begin()

    def _size_next(self) -> int:
        return self.sizes[min(self.generation + 1, len(self.sizes)) - 1]

    def _reap(self, ended: list[Rank]) -> None:
        for rank in ended:
            self.codes.append(rank.process.exitcode)
            self.ranks.remove(rank)
            self._selector.unregister(rank.process.sentinel)
            if rank.line is not None:
                self._selector.unregister(rank.line)
                rank.line.close()

    # --- the guards' socket ------------------------------------------------------------------------

    def _wait(self) -> None:
        left_s = self._give_up_at - time.monotonic()
        ready = self._selector.select(left_s) if left_s > 0 else []
        assert ready, f"still running: {[(each.number, each.parked) for each in self.ranks]}"
        self._take(ready)

    def _take(self, ready: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """Return whether a guard has said something."""
        lines = [key for key, _events in ready if isinstance(key.fileobj, socket.socket)]
        for key in lines:
            if key.fileobj is self._server:
                line, _address = self._server.accept()
                self._selector.register(line, selectors.EVENT_READ, data=[None, b""])
            else:
                self._receive(key.fileobj, key.data)  # type: ignore[arg-type]
        return bool(lines)

    def _receive(self, line: socket.socket, known: list[Any]) -> None:
        try:
            data = line.recv(1 << 16)
        except ConnectionResetError:  # it died before it had read all that was sent to it
            data = b""
        if not data:
            if known[0] is None or known[0] not in self.ranks:
                self._selector.unregister(line)
                line.close()
            elif known[0].line is line:
                self._selector.unregister(line)
                line.close()
                known[0].line = None
            return
        *texts, known[1] = (known[1] + data).split(b"\n")
        for text in texts:
            said = json.loads(text)
            if "hello" in said:
                known[0] = next(rank for rank in self.ranks if rank.process.pid == said["pid"])
                known[0].line = line
            self._note(known[0], said)

    def _note(self, rank: Rank, said: dict[str, Any]) -> None:
        rank.heals = said.get("heals", rank.heals)
        rank.refusal = said.get("cannot_heal", rank.refusal)
        if "parked" in said:
            assert said["parked"]["generation"] == self.generation
            rank.parked = True

    def _send(self, rank: Rank, message: dict[str, Any]) -> None:
        if rank.line is not None:
            with contextlib.suppress(OSError):  # it has just died
                rank.line.sendall(json.dumps(message).encode() + b"\n")
