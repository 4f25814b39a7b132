"""Report readiness, the watchdog's keep-alive and shutdown to systemd (sd_notify(3)).

Without NOTIFY_SOCKET nothing is sent. The event loop itself sends the keep-alive: if the loop hangs, the keep-alive
stops and systemd restarts the service.
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

    def send(self, words: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto(words.encode(), self._address)
            except OSError:
                pass  # the receiver is gone or does not read; this does not affect the service

    async def keep_alive(self) -> None:
        """Send the keep-alive twice per watchdog interval, until cancelled."""
        while self._address and self._watchdog_s:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """The watchdog interval; 0 if it is off, or if WATCHDOG_PID is another process."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(text) / 1e6
