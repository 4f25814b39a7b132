"""A real zygote without an agent: dozens of ranks for the price of one import of torch."""

from __future__ import annotations

import os
import select
import sys
import threading
from typing import TYPE_CHECKING, TypeVar

from side_by_side import Ended, clean_env

from launcher.ranks.zygote import Zygote, rank_argv
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.template.messages import Exited, Ready, Report, Spawn, SweepDone
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TIMEOUT_S = 180
R = TypeVar("R", bound=Report)


class WarmNode:
    def __init__(
        self, script: Path, env: Mapping[str, str] | None = None, preload: tuple[str, ...] = ()
    ) -> None:
        self._entry = EntryPoint(EntryKind.SCRIPT, str(script))
        self._zygote = Zygote.start(
            LaunchSpec(self._entry, JobSpec("warm-node"), preload=preload),
            clean_env(env),
            cgroup="",
            scratch=str(script.parent / f"scratch-{os.urandom(4).hex()}"),
            warm=True,
        )
        self._generation = 0
        ready = self._next(Ready)
        assert not ready.reason

    def run(self, env: Mapping[str, str]) -> Ended:
        """One rank, from its fork to its end; a signal that ended it shows as a negative code."""
        self._generation += 1
        (out, out_w), (err, err_w) = os.pipe(), os.pipe()
        argv = rank_argv(self._entry, sys.executable, ())
        order = Spawn(0, self._generation, argv, None, dict(env), (), False, False)
        self._zygote.spawn(order, (out_w, err_w))
        readers = [_Reader(out), _Reader(err)]
        ended = self._next(Exited)
        self._zygote.sweep(self._generation, patience_s=0.0)
        self._next(SweepDone)
        code = -ended.signum if ended.exit_code is None else ended.exit_code
        return Ended(code, *(reader.text() for reader in readers))

    def close(self) -> None:
        self._zygote.close()
        os.waitpid(self._zygote.pid, 0)

    def _next(self, kind: type[R]) -> R:
        while select.select([self._zygote], [], [], _TIMEOUT_S)[0]:
            reports = self._zygote.read()
            assert reports is not None, "the zygote ended"
            for report in reports:
                if isinstance(report, kind):
                    return report
        raise TimeoutError(f"the zygote did not tell of {kind.__name__}")


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
