"""What systemd is told of the service: that it is ready, that it turns, and that it stops (sd_notify(3)).

Without NOTIFY_SOCKET nobody asks, and nothing is said. The watchdog's word comes from the event loop itself: one that
hangs says nothing, and is started anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._watchdog_s = _watchdog_s(environ)

    def say(self, words: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto(words.encode(), self._address)
            except OSError:
                pass  # whoever asked is gone, or does not read; the service is none the worse

    async def keep_saying(self) -> None:
        """That the loop turns, twice in the time after which systemd would give it up."""
        while self._address and self._watchdog_s:
            self.say("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """0: nobody watches, or somebody watches another process."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(text) / 1e6
