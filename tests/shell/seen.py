"""A person's terminal: a real pseudo-terminal, and the screen that an emulator makes of what arrives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import termios
import threading
from typing import TYPE_CHECKING

import pyte
import pytest
from launched import SOON_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SeenTerminal:
    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (rows, columns))
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._grew = threading.Condition()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # the other end closed
            while chunk := os.read(self._master, 65536):
                with self._grew:
                    self.raw += chunk
                    self._stream.feed(chunk)
                    self._grew.notify_all()

    @property
    def rows(self) -> list[str]:
        """All that was ever shown, without empty rows."""
        columns = range(self.screen.columns)
        gone = ["".join(row[at].data for at in columns) for row in self.screen.history.top]
        return [row.rstrip() for row in (*gone, *self.screen.display) if row.strip()]

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: any(text in row for row in self.rows), text)

    def wait_until(self, condition: Callable[[], bool], what: str = "") -> None:
        with self._grew:
            assert self._grew.wait_for(condition, SOON_S), (what, self.rows)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        with self._grew:
            self.screen.resize(rows, columns)
        termios.tcsetwinsize(self._master, (rows, columns))

    def forget_slave(self) -> None:
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def end(self) -> list[str]:
        """All rows, once nothing has the terminal open any more."""
        self.forget_slave()
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        if self._master >= 0:
            os.close(self._master)
            self._master = -1
        return self.rows


def on_terminal(terminal: SeenTerminal) -> dict[str, object]:
    """Arguments of Popen for a process that the terminal controls."""

    def take_over() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    return {**streams, "preexec_fn": take_over}


@pytest.fixture(autouse=True)
def kind_of_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def seen() -> Iterator[SeenTerminal]:
    terminal = SeenTerminal()
    yield terminal
    terminal.end()
