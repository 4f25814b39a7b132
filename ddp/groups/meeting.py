"""Processes of a generation that was formed in place announce each group in its store before they form it.

A survivor reads the announcements of a member until it finds the group that it wants to form. So it does not wait for
a member that never forms this group.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from ddp.groups import stores
from ddp.groups.reform_plan import END, Announced, CannotReform, objection

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = "ddp/formed"


class Meeting:
    """The announcements of one generation, as this rank writes and reads them."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = PrefixStore(_PREFIX, stores.own_store(store))
        self._rank = rank
        self._said = 0
        self._read: dict[int, int] = {}  # by rank, how many announcements were read
        self._latest: dict[int, Announced] = {}

    def announce(self, group: Announced) -> None:
        self._store.set(f"{self._rank}/{self._said}", json.dumps(asdict(group)))
        self._said += 1

    def end(self) -> None:
        """Announce that this process forms no more groups of the world."""
        self.announce(Announced(END))

    def await_members(self, group: Announced, timeout_s: float, interrupted: Callable[[], str]) -> None:
        """Wait until all members are about to form the group. CannotReform: one of them does not form it.

        TimeoutError: a member has not arrived in time.
        """
        for rank in group.ranks:
            if rank != self._rank:
                self._await(rank, group, timeout_s, interrupted)

    def _await(self, rank: int, group: Announced, timeout_s: float, interrupted: Callable[[], str]) -> None:
        while True:
            theirs = self._next(rank, timeout_s, interrupted)
            if theirs.name in (group.name, END):
                break  # otherwise it is a group of which this process is not a member
        if problem := objection(group, rank, theirs):
            raise CannotReform(problem)

    def _next(self, rank: int, timeout_s: float, interrupted: Callable[[], str]) -> Announced:
        number = self._read.get(rank, 0)
        if self._latest.get(rank) == Announced(END):
            return self._latest[rank]
        key = f"{rank}/{number}"
        stores.await_keys(self._store, [key], timeout_s, interrupted)
        said = json.loads(self._store.get(key))
        self._read[rank] = number + 1
        self._latest[rank] = Announced(said["name"], tuple(said["ranks"]), said["backend"])
        return self._latest[rank]
