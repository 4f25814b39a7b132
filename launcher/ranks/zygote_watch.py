"""Receives the zygote's reports in order, and replaces a lost zygote.

One coroutine handles one report after the other. Nothing in it blocks the event loop: a thread kills and reaps the
processes that a lost zygote left behind. During this time requests are discarded, like requests that the old zygote had
not read. The state machine repeats them after `ZygoteReplaced`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from launcher.exchange import AgentEvent, StartFailed, ZygoteReplaced
from launcher.template.messages import Ready, Report
from rendezvous.values.cause_text import signal_name

if TYPE_CHECKING:
    from launcher.ranks.zygote import Zygote
    from launcher.ranks.zygote_starter import ZygoteStarter

_EXIT_S = 1.0  # from the end of the socket to the end of the process
_MOST_LOST = 3  # with no rank started in between: the cause is permanent
_READ_S, _LOOK_AGAIN_S, _LOOKS = 2.0, 0.5, 4  # how long an order to stop ranks may stay unread
_END_S = 15.0  # in addition to the zygote's own limit for processes that do not end


class ZygoteWatch:
    """`on_report` receives each report; `on_lost` receives the reason why all ranks of this node have ended."""

    def __init__(self, starter: ZygoteStarter, zygote: Zygote, say: Callable[[str], None]) -> None:
        self._starter, self._say = starter, say
        self.zygote = zygote
        self._is_ready = False
        self._lost_in_a_row = 0
        self._reports: asyncio.Queue[list[Report] | None] = asyncio.Queue()

    def ranks_started(self) -> None:
        self._lost_in_a_row = 0

    async def run(
        self,
        on_report: Callable[[Report], Awaitable[None]],
        on_lost: Callable[[str], None],
        happened: Callable[[AgentEvent], None],
    ) -> None:
        """Handle reports until no zygote can be started."""
        while True:
            self._listen()
            while (reports := await self._reports.get()) is not None:
                for report in reports:
                    self._is_ready = self._is_ready or isinstance(report, Ready)
                    await on_report(report)
            outcome = await self._replaced(on_lost)
            happened(outcome)
            if isinstance(outcome, StartFailed):
                return

    def _listen(self) -> None:
        self.zygote.when_blocked = self._write_later
        asyncio.get_running_loop().add_reader(self.zygote.fileno(), self._read)
        if not self.zygote.flush():
            self._write_later()

    def _read(self) -> None:
        reports = self.zygote.read()
        if reports is None:
            self._close()
        self._reports.put_nowait(reports)

    def _write_later(self) -> None:
        asyncio.get_running_loop().add_writer(self.zygote.fileno(), self._write)

    def _write(self) -> None:
        if self.zygote.flush():
            asyncio.get_running_loop().remove_writer(self.zygote.fileno())

    def _close(self) -> None:
        if self.zygote.fileno() >= 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.zygote.fileno())
            loop.remove_writer(self.zygote.fileno())
        self.zygote.close()

    async def _replaced(self, on_lost: Callable[[str], None]) -> AgentEvent:
        """Replace a lost zygote. Its ranks died with it (parent-death signal); the agent ends what they left behind."""
        how = _in_words(await asyncio.to_thread(self.zygote.await_end, _EXIT_S))
        if self._is_ready or self.zygote.is_pooled:
            reason = f"the zygote (pid {self.zygote.pid}), which starts the ranks, ended unexpectedly: {how}"
            self._say(f"ddp-launch: {reason}; starting a new zygote (see dmesg for an out-of-memory kill)")
        else:
            reason = f"the process that imports torch ended during the import: {how} (run python -c 'import torch')"
            self._starter.obstacle = reason
        await asyncio.to_thread(self._starter.clean_up)
        on_lost(reason)
        return self._another(reason)

    def _another(self, reason: str) -> AgentEvent:
        self._lost_in_a_row += 1
        if self._lost_in_a_row > _MOST_LOST or not (self._is_ready or self.zygote.warm):
            return StartFailed(f"this node cannot start ranks: {reason}")
        self._starter.warm = self.zygote.warm and (self._is_ready or self.zygote.is_pooled)
        self._is_ready = False
        try:
            self.zygote = self._starter.start()
        except OSError as error:
            return StartFailed(
                f"this node cannot start ranks: {error.strerror}. Check ulimit -u and the free memory"
            )
        return ZygoteReplaced(reason, 128 + signal.SIGKILL)

    # --- a zygote that does not act ------------------------------------------------------------------

    def signal(self, signum: int, pids: Iterable[int], only: Iterable[int] | None = None) -> None:
        """Signal these local ranks, or all. `pids` are their processes."""
        self.zygote.signal(signum, only)
        self._see_that_it_acts(signum, tuple(pids))

    def sweep(self, generation: int, patience_s: float, kept: Iterable[int] = ()) -> None:
        self.zygote.sweep(generation, patience_s, kept)
        self._see_that_it_acts(signal.SIGKILL, ())

    def _see_that_it_acts(self, signum: int, pids: tuple[int, ...]) -> None:
        self.zygote.resume()
        if self._is_ready:
            look = partial(self._look, self.zygote, signum, pids)
            asyncio.get_running_loop().call_later(_READ_S, look, _LOOKS)

    def _look(self, zygote: Zygote, signum: int, pids: tuple[int, ...], more: int) -> None:
        """A zygote that is blocked cannot stop ranks, so the agent does it: with this signal, or together with it."""
        if zygote is not self.zygote or not zygote.has_unread_orders:
            return
        if more:
            look = partial(self._look, zygote, signum, pids)
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, look, more - 1)
        elif signum != signal.SIGKILL:
            for pid in pids:  # this number is still theirs, since only the zygote awaits their end
                with contextlib.suppress(OSError):
                    os.kill(pid, signum)
        else:
            self._say(f"ddp-launch: the zygote (pid {zygote.process()}) does not act, and is killed")
            zygote.kill()
            self._close()  # it may never end, in a system call
            self._reports.put_nowait(None)

    # --- the end of the agent ----------------------------------------------------------------------

    def close(self) -> None:
        """End the zygote, which first kills all its descendants."""
        self._close()

    async def ended(self) -> None:
        await asyncio.to_thread(self._await_end)

    def _await_end(self) -> None:
        if self._is_ready or self.zygote.is_pooled:
            self.zygote.await_end(_END_S)
        self._starter.end()  # a zygote that still imports torch has no ranks, and does not read its socket


def _in_words(wait_status: int | None) -> str:
    if wait_status is None:
        return "the zygote closed its socket"
    if os.WIFSIGNALED(wait_status):
        return f"killed by {signal_name(os.WTERMSIG(wait_status))}"
    return f"exit code {os.WEXITSTATUS(wait_status)}"
