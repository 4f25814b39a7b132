"""The choice of a backend, and the layout of ranks on hosts (pure functions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The ranks of a group by host; hosts in the order of their lowest ranks."""

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def host(self) -> int:
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def here(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @property
    def member(self) -> int:
        return self.here.index(self.rank)

    @property
    def leaders(self) -> int:
        """How many ranks of each host reduce a slice and send it to other hosts:

        the ranks of the host with the fewest.
        """
        return min(len(ranks) for ranks in self.hosts)

    @property
    def is_leader(self) -> bool:
        return len(self.hosts) > 1 and self.member < self.leaders

    @property
    def sums_as_tree(self) -> bool:
        """Whether the core adds the ranks as a binary tree in their order: (0 + 1) + (2 + 3), and so on.

        It does so on each host. Along the ring of hosts the order is another one, but for two hosts there is only one.
        """
        each = len(self.hosts[0])
        return len(self.hosts) == 1 or (
            len(self.hosts) == 2
            and each.bit_count() == 1
            and self.hosts == (tuple(range(each)), tuple(range(each, 2 * each)))
        )

    def leader_at(self, host: int) -> int:
        """Return the rank on another host that reduces the same slice as this one."""
        return self.hosts[host % len(self.hosts)][self.member]


def layout(host_keys: Sequence[str], rank: int) -> HostLayout:
    hosts: dict[str, list[int]] = {}
    for number, key in enumerate(host_keys):
        hosts.setdefault(key, []).append(number)
    return HostLayout(tuple(tuple(ranks) for ranks in hosts.values()), rank)


def choose(world_size: int, local_world_size: int, has_native: bool) -> str:
    """The fastest backend for CPU tensors (docs/performance.md), from facts that are the same on all ranks."""
    if not has_native:
        return "gloo"
    return "shm" if local_world_size == world_size else "hier"
