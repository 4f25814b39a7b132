"""Release the threads of this rank that wait in a collective.

Theory of operation
-------------------
How a thread can be released depends on the library that blocks it. NCCL's groups and our own can be aborted. Gloo's
`abort()` does not release threads on CPUs, but shutting down its sockets does (see `peers.py`). Each group is aborted
in a thread of its own, and all of them together may take `ABORT_BUDGET_S`.

One attempt may not be enough. A group that the script is just creating is not in torch's tables yet, and its members
wait for each other as soon as it is. A rank that enters a collective of such a group waits for ranks that have parked
already. So the attempt is repeated until the rank has parked: with the groups that are in the tables then, and with the
connections that are known then. The intervals grow, because a rank may also be computing.

A collective of Gloo can be beyond release (`blocked_thread.py`). Then this process ends, so that the launcher starts
another one in its place at once. The other survivors keep theirs.

All of this runs on the guard's thread. The order to continue comes through the same thread and ends the repetition, so
a group of the next generation is never aborted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from . import torch_api
from .blocked_thread import BlockedThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from .peers import Peers

ABORT_BUDGET_S = 2.0
_AGAIN_AFTER_S, _AT_MOST_S = 0.1, 0.5
_NEVER = float("inf")


class Release:
    """What the guard of a rank does to release its threads."""

    def __init__(self, peers: Peers, asynchronous_backends: Callable[[Any], list[Any]]) -> None:
        self._peers = peers
        self._asynchronous_backends = asynchronous_backends
        self._aborting: list[tuple[Any, threading.Thread]] = []
        self._interval_s = _AGAIN_AFTER_S
        self._again_at = _NEVER
        self._thread: BlockedThread | None = None

    def watch_this_thread(self, on: bool) -> None:
        """It is the one that parks."""
        self._thread = BlockedThread() if on else None

    def begin(self) -> dict[str, Any]:
        """Abort all groups, and return what the launcher is told about it."""
        began = time.monotonic()
        self._aborting = [(group, _start_abort(group)) for group in torch_api.groups()]
        n_cut = self._peers.shut_down_all()
        for _group, thread in self._aborting:
            thread.join(max(0.0, began + ABORT_BUDGET_S - time.monotonic()))
        hung = sum(thread.is_alive() for _group, thread in self._aborting)
        took_s = round(time.monotonic() - began, 3)
        return {"groups": len(self._aborting), "cut": n_cut, "hung": hung, "took_s": took_s}

    # --- until the rank has parked -------------------------------------------------------------------

    def repeat(self) -> None:
        self._interval_s = _AGAIN_AFTER_S
        self._again_at = time.monotonic() + self._interval_s

    def due_in_s(self) -> float:
        return max(0.0, self._again_at - time.monotonic())

    def go_on(self) -> None:
        """Repeat the attempt if it is time to."""
        if time.monotonic() < self._again_at:
            return
        self._interval_s = min(2 * self._interval_s, _AT_MOST_S)
        self._again_at = time.monotonic() + self._interval_s
        for group in torch_api.groups():
            if self._may_abort_again(group):
                self._aborting.append((group, _start_abort(group)))
        self._peers.shut_down_all()
        thread = self._thread
        if thread is not None and self._is_on_cpus() and (where := thread.look()):
            _end_process(where)

    def end(self) -> None:
        """The rank has left all collectives, or is ordered to continue."""
        self._again_at = _NEVER
        self._aborting = []
        if (thread := self._thread) is not None:
            thread.forget()

    def _is_on_cpus(self) -> bool:
        """Otherwise a thread may be blocked because a device computes."""
        return not any(map(self._asynchronous_backends, torch_api.groups()))

    def _may_abort_again(self, group: Any) -> bool:
        """Our groups and Gloo's: the object stays when its members are replaced. Others may not bear a second abort."""
        before = [thread for each, thread in self._aborting if each is group]
        if any(thread.is_alive() for thread in before):
            return False
        return not before or not self._asynchronous_backends(group)


def _start_abort(group: Any) -> threading.Thread:
    thread = threading.Thread(target=_abort, args=(group,), name="ddp-abort", daemon=True)
    thread.start()
    return thread


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):
        group.abort()


def _end_process(where: str) -> None:
    words = (
        f"ddp: rank {os.environ.get('RANK', '?')} cannot leave {where}: the collective has not ended although its "
        "connections are shut down. This process ends, and the launcher starts a new one\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, words.encode())
    os._exit(1)
