"""The one loop of all that look at the ranks of a generation again and again.

`launcher.wiring.Parts` has them in a tuple. One of them is off if its options leave it nothing to look for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary


class RankWatcher:
    what: ClassVar[str]  # it does, in the message about an error

    def __init__(self, boundary: ErrorBoundary) -> None:
        self._boundary = boundary
        self._loop = asyncio.get_running_loop()
        self._generation = -1
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, generation: int) -> None:
        """The ranks of this generation run."""
        self.end()
        self._generation = generation
        self._later()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_s(self) -> float:
        """The time until the next look; 0.0 if this watcher is off."""
        raise NotImplementedError

    def look(self) -> None:
        raise NotImplementedError

    def _later(self) -> None:
        if pause_s := self.pause_s():
            self._timer = self._loop.call_later(pause_s, self._look)

    def _look(self) -> None:
        self._later()
        self._boundary.called(self.what, self.look, None)
