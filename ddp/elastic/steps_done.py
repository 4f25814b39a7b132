"""The function of a State that runs once for each finished step: `State(on_step=write_row)`, `commit(metrics=...)`.

A commit contains how many steps there were, and the metrics of the last one. The first rank calls the function after
the commit, and notes the number in the folder of its job. After a failure it skips the steps up to this number when
they are repeated. If it died between the commit and the call, the rank in its place makes the call, with the metrics
of the commit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddp.telemetry.contracts import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIELD = "_steps_done"  # of the State


class StepsDone:
    def __init__(
        self, call: Callable[[int, dict[str, Any]], object], fields: dict[str, Any], scope: str
    ) -> None:
        self._call, self._fields, self._scope = call, fields, scope
        fields[FIELD] = {"steps": 0, "metrics": {}}
        self._called = 0  # up to this step
        self._calls = False  # this is the rank that does

    def count(self, metrics: Mapping[str, Any] | None) -> None:
        """Before the commit of a step."""
        self._fields[FIELD] = {"steps": self._fields[FIELD]["steps"] + 1, "metrics": dict(metrics or {})}

    def resumed(self, is_first: bool) -> None:
        steps = self._fields[FIELD]["steps"]
        self._calls = is_first
        self._called = self._noted(steps)
        self.run()

    def run(self) -> None:
        """Call the function if this step is a new one."""
        steps, metrics = self._fields[FIELD]["steps"], self._fields[FIELD]["metrics"]
        if self._calls and steps > self._called:
            self._call(steps, dict(metrics))
            self._called = steps
            self._note()

    def _file(self) -> str:
        folder = os.environ.get(SCRATCH, "")
        return f"{folder}/steps-done{self._scope and '-'}{self._scope}" if folder else ""

    def _noted(self, steps: int) -> int:
        """Without a note, another job or a node that is lost has made the calls."""
        with suppress(OSError, ValueError), open(self._file(), "rb") as file:
            return int(file.read())
        return max(steps, self._called)

    def _note(self) -> None:
        if file := self._file():
            with suppress(OSError):
                fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.pwrite(fd, f"{self._called:020d}".encode(), 0)
                finally:
                    os.close(fd)
