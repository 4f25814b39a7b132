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


class PooledZygote(Zygote):
    is_pooled = True

    def __init__(self, control: socket.socket, lifeline: socket.socket) -> None:
        super().__init__(0, control, warm=True)
        self._lifeline = lifeline

    def await_end(self, timeout_s: float) -> int | None:
        """Wait until the zygote and everything it has left have ended. Return its wait status, or None if unknown."""
        give_up = time.monotonic() + timeout_s
        while (message := self._next(give_up)) is not None:
            if "ended" in message:
                return int(message["ended"])
            self.pid = int(message.get("zygote", 0))
        return None

    def _next(self, give_up: float) -> dict[str, Any] | None:
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            return None
        with contextlib.suppress(OSError):
            self._lifeline.settimeout(left_s)
            return pool_wire.receive(self._lifeline)[0]
        return None
