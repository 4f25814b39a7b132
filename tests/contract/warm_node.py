"""A real zygote without an agent: dozens of ranks for the price of one import of torch."""

from __future__ import annotations

import os
import select
import sys
import threading
from typing import TYPE_CHECKING

from side_by_side import Ended, clean_env

from launcher.ranks.zygote import SpawnOrder, Zygote, rank_argv
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from launcher.template.wire import Message

_TIMEOUT_S = 180


class WarmNode:
    def __init__(self, script: Path, env: Mapping[str, str] | None = None) -> None:
        self._entry = EntryPoint(EntryKind.SCRIPT, str(script))
        self._zygote = Zygote.start(
            LaunchSpec(self._entry, "warm-node"),
            clean_env(env),
            cgroup="",
            scratch=str(script.parent / f"scratch-{os.urandom(4).hex()}"),
            warm=True,
        )
        self._generation = 0
        ready = self._next("ready")
        assert ready["warm"], ready["reason"]

    def run(self, env: Mapping[str, str]) -> Ended:
        """One rank, from its fork to its end; a signal that ended it shows as a negative code."""
        self._generation += 1
        (out, out_w), (err, err_w) = os.pipe(), os.pipe()
        argv = rank_argv(self._entry, sys.executable, ())
        order = SpawnOrder(0, self._generation, argv, None, dict(env), (), False, False)
        self._zygote.spawn(order, (out_w, err_w))
        os.close(out_w)
        os.close(err_w)
        readers = [_Reader(out), _Reader(err)]
        ended = self._next("exited")
        self._zygote.sweep(self._generation)
        self._next("swept")
        code = -ended["signal"] if ended["signal"] else ended["exit_code"]
        return Ended(code, *(reader.text() for reader in readers))

    def close(self) -> None:
        self._zygote.close()
        os.waitpid(self._zygote.pid, 0)

    def _next(self, event: str) -> Message:
        while select.select([self._zygote], [], [], _TIMEOUT_S)[0]:
            messages = self._zygote.read()
            assert messages is not None, "the zygote ended"
            for message in messages:
                if message["event"] == event:
                    return message
        raise TimeoutError(f"the zygote did not tell of {event}")


class _Reader:
    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "rb")
        self._data = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._file:
            self._data = self._file.read()

    def text(self) -> str:
        self._thread.join()
        return self._data.decode(errors="replace")
