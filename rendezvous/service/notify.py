"""What the service tells its surroundings: its state to systemd, and its log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# --- systemd ---------------------------------------------------------------------------------------
#
# Report readiness, the watchdog's keep-alive and shutdown to systemd (sd_notify(3)).
#
# Without NOTIFY_SOCKET nothing is sent. The event loop itself sends the keep-alive: if the loop hangs, the keep-alive
# stops and systemd restarts the service.


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


# --- the log ---------------------------------------------------------------------------------------
#
# The log of the service: text or JSON lines, each with its job and generation if it concerns one.

_FIELDS = ("job", "generation", "kind")


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = "".join(f" {name}={_one_line(value)}" for name, value in _extra_fields(record).items())
        text = f"{at} {record.levelname.lower()}{fields}: {_one_line(record.getMessage())}"
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"at": round(record.created, 3), "level": record.levelname.lower(), **_extra_fields(record)}
        fields["text"] = record.getMessage()
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}


def _one_line(value: object) -> str:
    """Escape line breaks: names and reasons come from clients and must not look like another log line."""
    text = str(value)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "\\n" if c == "\n" else "?" for c in text)
    )


def start_logging(form: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
