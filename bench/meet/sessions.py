"""The driver's end of the process that holds the many sessions: one line asked, one line answered."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from watched import RunFailed

if TYPE_CHECKING:
    from types import TracebackType

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "many_agents.py")


class Sessions:
    def __init__(self, endpoint: str, job: str, count: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            [sys.executable, _PROGRAM, endpoint, job, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._pid = self._process.pid

    def meet(self) -> dict[str, float]:
        self._answer()  # it has read its modules
        return self._ask("meet")

    def stay(self, seconds: float) -> float:
        """The processor seconds that all the clients took meanwhile."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return self._cpu_seconds() - before

    def _ask(self, word: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
            raise RunFailed(f"no answer within {self._timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"the clients ended with exit code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _cpu_seconds(self) -> float:
        return time.clock_gettime((~self._pid << 3) | 2)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate()
