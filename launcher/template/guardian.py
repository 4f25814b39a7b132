"""The guardian: the parent of a zygote that was forked from a template, for one job.

A zygote that the agent starts is its child: the agent learns how it ended, and gets the processes that it leaves
behind. A process cannot be given to another parent. So a fork of the template takes this part. It is a subreaper, and
its only child is the zygote. When the zygote has ended, it ends what is left, and then tells the agent over a socket.
If the agent ends, the zygote ends itself, as always, and the guardian follows. It does not depend on the template,
which may end at any time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from . import pool_wire, tree
from .forking import fork

if TYPE_CHECKING:
    import socket

_END_S = 20.0  # after the agent: the zygote needs some of it to end the ranks
_SEND_S = 2.0


def guard(lifeline: socket.socket, others: list[int]) -> None:
    """Call this in a fork of the template. It returns in the zygote only. `others` belong to the zygote."""
    os.setsid()
    tree.become_subreaper()
    pid, obstacle = fork()
    if pid == 0:
        os.setsid()
        lifeline.close()
        return
    for fd in others:
        os.close(fd)
    _leave_streams()
    lifeline.settimeout(_SEND_S)
    if obstacle:
        _tell(lifeline, {"obstacle": obstacle})
        os._exit(1)
    _tell(lifeline, {"zygote": pid})
    _stay(lifeline, pid)


def _leave_streams() -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        if null > 2:
            os.close(null)


def _stay(lifeline: socket.socket, zygote: int) -> NoReturn:
    try:
        status = _await(lifeline, zygote)
        tree.reap_all(os.getpid())
        _tell(lifeline, {"ended": status})
    finally:
        os._exit(0)


def _await(lifeline: socket.socket, zygote: int) -> int:
    ended = os.pidfd_open(zygote)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(lifeline, select.POLLRDHUP)
    give_up = 0.0
    while True:
        left_s = max(0.0, give_up - time.monotonic()) if give_up else None
        found = dict(poll.poll(None if left_s is None else left_s * 1000 + 1))
        if ended in found:
            return os.waitpid(zygote, 0)[1]
        if give_up and time.monotonic() >= give_up:
            os.kill(zygote, signal.SIGKILL)
        elif lifeline.fileno() in found:  # the agent has ended: the zygote sees that, too
            poll.unregister(lifeline)
            give_up = time.monotonic() + _END_S


def _tell(lifeline: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        pool_wire.send(lifeline, message)
