"""Reads the ranks' pages periodically, and reports when a rank may hang.

launcher/health/stall_detection.py defines that.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from launcher.health import stall_detection
from launcher.health.stall_detection import WINDOW_S, Signs, Watch
from launcher.health.watcher import RankWatcher
from launcher.settings.spec import ASLEEP_S, Budgets
from launcher.template import tree
from launcher.template.tree import process_stat

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from rendezvous.values.rank_view import RankReport, RankView


_AGAIN_S = 5.0  # a service that has just started does not have earlier reports
_AGAIN_IF_IDLE_S = ASLEEP_S / 20  # so late may a verdict be
_LOOKS_PER_LIMIT = 4


class HangWatch(RankWatcher):
    """`processes`: by rank. `output`: a number that changes with each output of a rank. `say`: tells the user.

    `store_port`: libraries poll the store of the ranks, also when nothing happens.
    """

    what = "looking for hangs"

    def __init__(
        self,
        budgets: Budgets,
        views: Callable[[], tuple[RankView, ...]],
        processes: Callable[[], Mapping[int, int]],
        output: Callable[[], int],
        store_port: Callable[[], int],
        report: Callable[[int], None],
        say: Callable[[str], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._budgets, self._views, self._processes, self._output = budgets, views, processes, output
        self._store_port, self._report, self._say = store_port, report, say
        super().__init__(boundary)
        self._watch = Watch(self._loop.time())
        self._reported_at = float("-inf")
        self._early: frozenset[tuple[int, int, int]] = frozenset()
        self._has_warned = False

    def begin(self, generation: int) -> None:
        self._watch = Watch(self._loop.time())
        self._reported_at = float("-inf")
        super().begin(generation)

    def pause_s(self) -> float:
        return self._budgets.period_s if self._budgets.enabled else 0.0

    def contact(self, held: bool) -> None:
        """Report a stall again: the service did not receive the reports while it was unreachable."""
        if held:
            self._reported_at = float("-inf")
            self._early = frozenset()

    def reports(self) -> tuple[RankReport, ...]:
        """The state of the ranks now."""
        views, now = self._views(), self._loop.time()
        looks = self._looks(views, now) if self._budgets.by_evidence else {}
        self._watch = stall_detection.look(self._watch, views, now, self._budgets.period_s, looks)
        return stall_detection.reports(self._watch, views, self._budgets)

    def _looks(self, views: tuple[RankView, ...], now: float) -> dict[int, Signs]:
        window_s = min(WINDOW_S, ASLEEP_S / _LOOKS_PER_LIMIT)
        chosen = stall_detection.to_look_at(self._watch, views, now, window_s)
        if not chosen:
            return {}
        processes, output, connections = self._processes(), self._output(), tcp_bytes(self._store_port())
        daemons = daemons_of(processes.values())
        return {
            view.rank: signs_of(processes[view.rank], view.pid, output, connections, daemons)
            for view in chosen
            if view.rank in processes
        }

    def look(self) -> None:
        ranks = self._boundary.called("reading the state of the ranks", self.reports, ())
        is_overdue = stall_detection.is_overdue(ranks)
        again_s = _AGAIN_S if is_overdue else _AGAIN_IF_IDLE_S
        is_due = self._loop.time() - self._reported_at >= again_s
        before, self._early = self._early, stall_detection.early_questions(ranks)
        if self._early - before or (is_due and (is_overdue or stall_detection.is_idle(ranks))):
            self._reported_at = self._loop.time()
            self._report(self._generation)
        if not self._has_warned and (waiting := stall_detection.waits_for_long(ranks)) is not None:
            self._has_warned = True
            self._warn(waiting)

    def _warn(self, waiting: RankReport) -> None:
        call, minutes = waiting.waits_in[-1], waiting.waits_s / 60
        self._say(
            f"ddp-launch: rank {waiting.rank} has waited for {minutes:.0f} min in {call.op} #{call.seq}. There is no "
            "evidence of a hang, so the job goes on. To end a job that waits for so long, use --hang-timeout 10min "
            "(ddp-launch docs hangs)"
        )


# --- signs of life of processes --------------------------------------------------------------------
#
# Reads from /proc what a rank and the processes that it has started have done so far.

_COUNTED = (b"rchar:", b"wchar:")

# What sock_diag(7) and inet_diag.h of Linux define: a header of a netlink message, a request, its answer.
_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_PORTS_AT, _INODE_AT, _ATTRIBUTES_AT = 16 + 4, 16 + 68, 16 + 72
_TCP_INFO, _ESTABLISHED, _CLOSE_WAIT = 2, 1, 8
_ACKED_AND_RECEIVED_AT = 120  # in struct tcp_info
_ANSWER_S = 1.0


def signs_of(
    pid: int, writer: int, output: int, connections: Mapping[int, int], daemons: Iterable[int] = ()
) -> Signs:
    """`writer`: the one of these processes that writes the status page; 0 if none does.

    `daemons`: see `daemons_of`. `connections`: see `tcp_bytes`.
    """
    processes = (pid, *tree.descendants(pid), *daemons)
    own = writer if writer in processes else pid
    main_cpu_s = _cpu_s(own, task=str(own))
    return Signs(
        main_cpu_s=main_cpu_s,
        other_cpu_s=sum(map(_cpu_s, processes)) - main_cpu_s,
        io_bytes=sum(map(_io_bytes, processes)),
        network_bytes=sum(connections[each] for each in _sockets(processes) if each in connections),
        output=output,
        processes=frozenset(processes),
    )


def daemons_of(ranks: Collection[int]) -> tuple[int, ...]:
    """Return the processes that ranks of this node have started, and whose parents have ended: now the zygote's.

    They may belong to any of the ranks. The zygote's own processes, which keep the store, are in its session.
    """
    found: list[int] = []
    stats = filter(None, map(process_stat, ranks))
    for zygote in {stat.parent for stat in stats}:
        own = process_stat(zygote)
        if own is not None:
            found += tree.descendants(zygote, partial(_is_not_orphaned, ranks, own.session))
    return tuple(found)


def _is_not_orphaned(ranks: Collection[int], session_of_zygote: int, pid: int) -> bool:
    stat = process_stat(pid)
    return pid in ranks or stat is None or stat.session == session_of_zygote


def _cpu_s(pid: int, task: str = "") -> float:
    stat = process_stat(pid, task)
    return 0.0 if stat is None else stat.cpu_s


def _io_bytes(pid: int) -> int:
    """Return 0 if the process has ended, or belongs to another user."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/io", "rb") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(_COUNTED))
    return 0


def _sockets(processes: tuple[int, ...]) -> set[int]:
    """The inodes: a socket that two processes share counts once."""
    found = set()
    for pid in processes:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                    if kind == "socket":
                        found.add(int(inode.strip("[]")))
    return found


def tcp_bytes(left_out: int) -> dict[int, int]:
    """What went over each TCP connection so far, by inode. /proc does not count it.

    `left_out`: a port. {}: the kernel does not say, as in some containers.
    """
    found: dict[int, int] = {}
    with (
        suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link,
    ):
        link.settimeout(_ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            states, wanted = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT, 1 << (_TCP_INFO - 1)
            request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, wanted, 0, states).ljust(56, b"\0")
            link.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
            for message in _messages(link):
                if left_out not in struct.unpack_from(">HH", message, _PORTS_AT):
                    found[struct.unpack_from("=I", message, _INODE_AT)[0]] = _counted(message)
    return found


def _messages(link: socket.socket) -> Iterator[bytes]:
    """The answers to a request."""
    while True:
        data = link.recv(1 << 16)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind in (_ERROR, _DONE):
                return
            yield data[:length]
            data = data[(length + 3) & ~3 :]


def _counted(message: bytes) -> int:
    at = _ATTRIBUTES_AT
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _TCP_INFO and length >= 4 + _ACKED_AND_RECEIVED_AT + 16:
            return sum(struct.unpack_from("=QQ", message, at + 4 + _ACKED_AND_RECEIVED_AT))
        at += max(4, (length + 3) & ~3)
    return 0
