"""The processes that keep the stores of generations, as the zygote starts and ends them (`store`).

The socket of a store listens before the answer to the agent. So ranks can connect from then on, and the kernel lets
them wait. The process that serves it is forked behind the first rank of its generation on this node: a fork of the
zygote takes some milliseconds, and a rank needs more than that before it connects. If no rank is started soon, the
process is forked all the same: ranks of other nodes connect as well, and ranks that have kept their processes.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from . import rank, store, tree
from .forking import fork
from .messages import KeeperEnded, Keeping

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from .messages import Keep, Report

_WAIT_FOR_RANK_S = 0.005  # a service in the agent answers within 2 to 4 ms


class _Keeper(NamedTuple):
    generation: int
    error: int  # read end of the pipe to which it writes its last error


class _Listening(NamedTuple):
    """A store that no process serves yet."""

    sock: socket.socket
    order: Keep
    due_at: float


def bound(order: Keep, *, is_kept: bool) -> tuple[socket.socket | None, Keeping]:
    """Return the socket of a store and the answer to the agent. `is_kept`: a process of the zygote will serve it."""
    try:
        sock = store.bound_socket(order.host, order.port, listen=is_kept)
    except OSError as error:
        return None, Keeping(order.generation, 0, is_kept, error=str(error.strerror))
    return sock, Keeping(order.generation, sock.getsockname()[1], is_kept)


class Keepers:
    """`become_child` is called first in each fork."""

    def __init__(self, become_child: Callable[[], None], tell: Callable[[Report], None]) -> None:
        self._become_child, self._tell = become_child, tell
        self._pid = os.getpid()
        self._running: dict[int, _Keeper] = {}
        self._listening: list[_Listening] = []

    def __len__(self) -> int:
        return len(self._running)

    def listen(self, order: Keep) -> None:
        """Open the socket of a store, and tell its port."""
        if order.port:
            self._end()  # keepers may hold the requested port until then
        sock, answer = bound(order, is_kept=True)
        if sock is not None:
            self._listening.append(_Listening(sock, order, time.monotonic() + _WAIT_FOR_RANK_S))
        self._tell(answer)

    def rank_started(self) -> None:
        """The first rank has been forked, or another one: nothing waits any more."""
        while self._listening:
            self._fork(self._listening.pop(0))

    def wait_s(self) -> float | None:
        """The time until a store must be served, although no rank was started; None if there is none."""
        return max(0.0, self._listening[0].due_at - time.monotonic()) if self._listening else None

    def turn(self) -> None:
        while self.wait_s() == 0.0:
            self._fork(self._listening.pop(0))

    def _fork(self, each: _Listening) -> None:
        sock, order = each.sock, each.order
        error, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid, obstacle = fork()
        if pid == 0:
            with rank.exit_on_error():
                self._become_child()
                tree.die_with_parent(self._pid)
                store.keep(sock, order.host, write)
        sock.close()
        os.close(write)
        if obstacle:
            os.close(error)
            self._tell(KeeperEnded(order.generation, f"its process cannot be started: {obstacle}"))
            return
        self._running[pid] = _Keeper(order.generation, error)

    def give_up(self) -> None:
        """Close the sockets that no process serves: the world is over. A sweep ends the processes."""
        for each in self._listening:
            each.sock.close()
        self._listening.clear()

    def _end(self) -> None:
        self.give_up()
        for pid, keeper in self._running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(keeper.error)
        self._running.clear()

    def ended(self, pid: int, status: int, is_expected: bool) -> None:
        """The loop has waited for this child, whatever it was."""
        keeper = self._running.pop(pid, None)
        if keeper is None:
            return
        reason = os.read(keeper.error, 4096).decode(errors="replace")
        os.close(keeper.error)
        if not is_expected:
            self._tell(KeeperEnded(keeper.generation, reason or _in_words(status)))

    def forget(self) -> None:
        """Close the descriptors, in a fork of the zygote."""
        self.give_up()
        for keeper in self._running.values():
            os.close(keeper.error)


def _in_words(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(number, f'signal {number}')}"
