"""A zygote that was forked from a template: not our child. Its guardian tells how it ends."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from launcher.ranks.zygote import Zygote
from launcher.template import pool_wire

if TYPE_CHECKING:
    import socket
    from typing import Any

_FIRST_WORDS_S = 0.1


class PooledZygote(Zygote):
    is_pooled = True

    def __init__(self, control: socket.socket, lifeline: socket.socket) -> None:
        super().__init__(0, control, warm=True)
        self._lifeline = lifeline
        self._ended: int | None = None

    def process(self) -> int:
        """The guardian tells it first of all."""
        if not self.pid:
            self._take(time.monotonic() + _FIRST_WORDS_S)
        return self.pid

    def await_end(self, timeout_s: float) -> int | None:
        """Wait until the zygote and everything it has left have ended. Return its wait status, or None if unknown."""
        give_up = time.monotonic() + timeout_s
        while self._ended is None and self._take(give_up):
            pass
        return self._ended

    def _take(self, give_up: float) -> bool:
        """Take one message of the guardian. Return whether there was one."""
        message = self._next(give_up)
        if message is None:
            return False
        if "ended" in message:
            self._ended = int(message["ended"])
        self.pid = int(message.get("zygote", self.pid))
        return True

    def _next(self, give_up: float) -> dict[str, Any] | None:
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            return None
        with contextlib.suppress(OSError):
            self._lifeline.settimeout(left_s)
            return pool_wire.receive(self._lifeline)[0]
        return None
