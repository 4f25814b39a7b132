"""The driver's end of the processes that hold the many sessions: one line asked, one line answered."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from watched import RunFailed

if TYPE_CHECKING:
    from types import TracebackType

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "many_agents.py")


_FEWEST = 256  # are not worth a second process


def _per_process(count: int) -> int:
    """One process takes one processor; a gRPC channel takes two file descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = count if hard == resource.RLIM_INFINITY else (hard - _FEWEST) // 2
    return min(most, max(_FEWEST, -(-count // (os.cpu_count() or 1))))


class Sessions:
    def __init__(
        self, endpoint: str, job: str, count: int, timeout_s: float, *, questions: bool = False
    ) -> None:
        self._timeout_s = timeout_s
        share = _per_process(count)
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    _PROGRAM,
                    endpoint,
                    job,
                    str(first),
                    str(min(share, count - first)),
                    str(count),
                    *(["questions"] if questions else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for first in range(0, count, share)
        ]

    def meet(self) -> dict[str, float]:
        """Seconds from the word to the last agent's."""
        for process in self._processes:
            self._answer(process)  # it has read its modules
        began = time.monotonic()
        answers = self._all("meet")
        return {key: max(answer[key] for answer in answers) - began for key in ("assigned", "ready")}

    def fail(self, generation: int, node_rank: int) -> list[dict[str, Any]]:
        """A rank of that node fails. Each process answers when its agents run in the next generation."""
        return self._all(json.dumps({"fail": generation, "rank": node_rank}))

    def part(self) -> list[dict[str, Any]]:
        """All ranks finish. Each process answers with the outcomes that its agents were told."""
        return self._all(json.dumps({"part": True}))

    def _all(self, order: str) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{order}\n".encode())
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def stay(self, seconds: float) -> float:
        """The processor seconds that all the clients took meanwhile."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return self._cpu_seconds() - before

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], self._timeout_s)[0]:
            raise RunFailed(f"no answer within {self._timeout_s:g} s")
        line = process.stdout.readline()
        if not line:
            raise RunFailed(f"the clients ended with exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu_seconds(self) -> float:
        return sum(time.clock_gettime((~process.pid << 3) | 2) for process in self._processes)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()
            process.wait()
