"""The standard output and error of the `--hosts` command. Lines wait for their reader, and the agents wait too."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from launcher.output.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable

_TERMINAL_S = 5.0  # at the end, for a terminal that is slow to take the last lines


class Outputs:
    def __init__(self) -> None:
        self.out, self.err = Terminal(1), Terminal(2)
        self._has_room = {terminal: asyncio.Event() for terminal in (self.out, self.err)}

    async def put(self, terminal: Terminal, lines: Iterable[bytes]) -> None:
        """Show whole lines after all earlier ones are read."""
        await self._reader_of(terminal)
        terminal.put(b"".join(lines), "")
        self._flush(terminal)

    def say(self, text: str) -> None:
        self.err.say(text)
        self._flush(self.err)

    def abandon(self) -> None:
        """Drop what the readers have not taken."""
        for terminal, has_room in self._has_room.items():
            if not terminal.is_idle:
                terminal.give_up()
            has_room.set()

    async def close(self) -> None:
        """Wait until all is read, or `abandon`. A terminal has a limited time."""
        if lost := self.out.lost_lines(is_over=True):
            self.say(f"ddp-launch: standard output {lost}")
        for terminal in (self.out, self.err):
            self._flush(terminal)
            if not terminal.is_tty:
                await self._reader_of(terminal)
            terminal.close(time.monotonic() + _TERMINAL_S)

    async def _reader_of(self, terminal: Terminal) -> None:
        while not terminal.is_idle and not terminal.is_gone:
            await self._has_room[terminal].wait()

    def _flush(self, terminal: Terminal) -> None:
        terminal.flush()
        loop = asyncio.get_running_loop()
        if terminal.is_idle or terminal.is_gone:
            self._has_room[terminal].set()
            if terminal.fd >= 0:
                loop.remove_writer(terminal.fd)
        else:
            self._has_room[terminal].clear()
            loop.add_writer(terminal.fd, self._flush, terminal)
