"""Create the backends `shm` (one host) and `hier` (shared memory on each host, a TCP ring between hosts).

The ranks publish in the store which host they are on. Either all ranks use the compiled core, or all use Gloo.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp.groups import core_loading, joining, ring, segment, stores
from ddp.groups.backends import Layout, layout
from ddp.groups.shared_group import SharedGroup
from ddp.groups.shared_work import CombinedWork, FinishedWork, SharedWork
from ddp.telemetry import collective_marks
from ddp.telemetry.coded import WrongValue
from ddp.telemetry.collective_facts import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from ddp.groups.membership import FormsCore

# Bytes per turn; each member has two buffers. On one host the buffers fit a core's cache. Across hosts they are large
# enough for the link. With one rank per host, ranks do not use buffers: it is only the portion sent around the ring.
STAGING_NEAR = 1 << 19
STAGING_FAR = 1 << 22
STAGING_ALONE = 1 << 26
# The minimum timeout for creating a group. The group's own timeout may be shorter.
MIN_CREATION_S = 30.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """The data that a rank publishes.

    If `reason` is set, the rank cannot use the core, and the other fields are empty.
    """

    host: str = ""
    host_name: str = ""
    reason: str = ""
    listener: str = ""
    listener_secret: str = ""
    address: str = ""
    port: int = 0
    port_secret: str = ""


class _Unable(Exception):
    """A rank cannot use the core, so no rank uses it."""


class _Setup:
    """Creates the group. Each rank has its own instance."""

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: list[int],
        interrupted: Callable[[], str] = stores.never,
    ) -> None:
        self.name = name
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout_s = max(timeout.total_seconds(), MIN_CREATION_S)
        self.ranks = ranks or list(range(size))
        self.interrupted = interrupted
        self.listener: segment.Listener | None = None
        self.port: ring.Port | None = None

    def core(self) -> tuple[Any, Layout | None]:
        """Return the core's group and the hosts of its ranks. Both are None if all ranks must use Gloo."""
        entries = [
            _Entry(**json.loads(each))
            for each in self._exchange("entry", json.dumps(asdict(self._own_entry())))
        ]
        try:
            return self._form(entries)
        except _Unable as reason:
            core_loading.warn_once(str(reason))
            return None, None
        finally:
            for each in (self.listener, self.port):
                if each is not None:
                    each.socket.close()

    def _exchange(self, what: str, mine: str) -> list[str]:
        self.store.set(f"{what}/{self.rank}", mine)
        self._await([f"{what}/{other}" for other in range(self.size)])
        return [self.store.get(f"{what}/{other}").decode() for other in range(self.size)]

    def _await(self, keys: list[str]) -> None:
        """Wait for keys with the group's timeout. The store's own timeout can be 30 minutes (the default group's)."""
        try:
            stores.await_keys(self.store, keys, self.timeout_s, self.interrupted)
        except TimeoutError as error:
            late = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self.store.check([key])]
            who = f"{name_ranks(late)} {'has' if len(late) == 1 else 'have'}"
            raise dist.DistBackendError(
                f"{who} not joined the new group {self.name} within {self.timeout_s:g} s. All ranks must create their "
                "groups in the same order. See the log of that rank"
            ) from error

    def _own_entry(self) -> _Entry:
        if core_loading.native() is None:
            return _Entry(reason="has no compiled core: install the same package on all ranks")
        try:
            self.listener = segment.open_listener()
            if self.name == "hier":
                self.port = ring.open_port()
            host = os.environ.get("DDP_HOST_KEY", "") + segment.host_key()
        except OSError as error:
            return _Entry(reason=f"cannot set up its sockets: {error}")
        entry = _Entry(
            host, socket.gethostname(), listener=self.listener.name, listener_secret=self.listener.secret
        )
        if self.port is None:
            return entry
        address, number, secret = self.port.address, self.port.number, self.port.secret
        return replace(entry, address=address, port=number, port_secret=secret)

    def _form(self, entries: list[_Entry]) -> tuple[Any, Layout]:
        for rank, entry in zip(self.ranks, entries, strict=True):
            if entry.reason:
                raise _Unable(f"rank {rank} {entry.reason}")
        placed = layout([entry.host for entry in entries], self.rank)
        if self.name == "shm" and len(placed.hosts) > 1:
            raise WrongValue(
                f"the backend shm supports ranks on one host only, but this group has ranks on {len(placed.hosts)} "
                "hosts. Use hier, which is shm on each host and a ring between hosts"
            )
        made: Any = None
        try:
            made, reason = self._connect(entries, placed), ""
        except OSError as error:
            reason = f"cannot share memory or connect: {error}"
        for rank, problem in zip(self.ranks, self._exchange("ready", reason), strict=True):
            if problem:
                raise _Unable(f"rank {rank} {problem}")
        return made, placed

    def _connect(self, entries: list[_Entry], placed: Layout) -> Any:
        native = core_loading.native()
        assert native is not None
        assert self.listener is not None
        staging = _staging(placed)
        region = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        listeners = [(entries[rank].listener, entries[rank].listener_secret) for rank in placed.here]
        length = native.length(len(placed.here), staging, region)
        near = segment.connect_members(
            self.listener, listeners, placed.member, length, self.timeout_s, self.interrupted
        )
        far, links = None, (0, 0, -1, -1, 0, 0)
        try:
            if placed.is_leader:
                far = self._link(entries, placed)
                previous = self.ranks[placed.leader_at(placed.host - 1)]
                links = (0, 0, *far.sockets(), self.ranks[placed.leader_at(placed.host + 1)], previous)
            if len(placed.hosts) > 1:
                links = (len(placed.hosts), placed.host, *links[2:])
            members = [self.ranks[rank] for rank in placed.here]
            leaders = placed.leaders
            hosts = self._labels(entries, placed)
            made = native.Group(
                near.file, placed.member, near.sockets(), members, staging, region, leaders, links, hosts
            )
        except OSError:
            near.close()
            if far is not None:
                far.close()
            raise
        near.hand_over()
        if far is not None:
            far.hand_over()
        return made

    def _labels(self, entries: list[_Entry], placed: Layout) -> list[str]:
        """The ranks and the name of each host, for error messages."""
        return [
            f"{name_ranks([self.ranks[rank] for rank in ranks])} on {entries[ranks[0]].host_name}"
            for ranks in placed.hosts
        ]

    def _link(self, entries: list[_Entry], placed: Layout) -> ring.Links:
        assert self.port is not None
        following = entries[placed.leader_at(placed.host + 1)]
        previous = placed.leader_at(placed.host - 1)
        where = (following.address, following.port, following.port_secret)
        return ring.join(self.port, self.rank, where, previous, self.timeout_s, self.interrupted)


def _staging(placed: Layout) -> int:
    if len(placed.hosts) == 1:
        return STAGING_NEAR
    return STAGING_FAR if max(len(ranks) for ranks in placed.hosts) > 1 else STAGING_ALONE


def _forming(name: str) -> FormsCore:
    def form(
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: list[int],
        interrupted: Callable[[], str],
    ) -> tuple[Any, Layout | None]:
        return _Setup(name, store, rank, size, timeout, ranks, interrupted).core()

    return form


def _create(name: str, asked: Any) -> SharedGroup:
    ranks = list(asked.global_ranks_in_group)
    size, timeout = asked.group_size, asked.timeout
    return SharedGroup(name, asked.store, asked.group_rank, size, timeout, _forming, ranks)


def create_shm(asked: Any, _options: Any = None) -> SharedGroup:
    return _create("shm", asked)


def create_hier(asked: Any, _options: Any = None) -> SharedGroup:
    return _create("hier", asked)


def register() -> bool:
    """Register `shm` and `hier` with torch.distributed; return whether the compiled core is available."""
    for name, create in (("shm", create_shm), ("hier", create_hier)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    joining.watch(SharedGroup)
    collective_marks.watch(SharedGroup, (SharedWork, FinishedWork, CombinedWork))
    return core_loading.native() is not None


register()
