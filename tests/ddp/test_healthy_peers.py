"""A peer that has only destroyed its groups is healthy: no error names it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp.telemetry import peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks import Ranks

GROUPS = 5  # the kernel uses the descriptors of one again for the next
_WITHIN_S = 60.0
_kept: list[dist.ProcessGroup] = []


def names_nobody(rank: int) -> list[str]:
    """Rank 0 sees that the others close their connections of each group. Whom does it name then?"""
    known, named = peers.Peers(), list[str]()
    for number in range(GROUPS):
        group = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
        known.identify()
        _await(lambda: _leads_to_all(known))
        dist.barrier()
        addresses = [one.there.replace(" ", ":") for one, _peer in known._known.values()]
        if rank or number % 2:
            dist.destroy_process_group(group)
        else:
            _kept.append(group)  # until it is collected
        del group
        dist.barrier()
        if rank == 0 and not number % 2:
            _await(lambda: _sees_closings(known))
        for text in (
            "Connection closed by peer",
            *(f"Connection reset by peer [{end}]" for end in addresses),
        ):
            if peer := known.peer_in(text):
                named.append(f"{text}: {peer}")
    for group in _kept:
        dist.destroy_process_group(group)
    _kept.clear()
    known.end()
    dist.barrier()
    return named


def _sees_closings(known: peers.Peers) -> bool:
    """Gloo's thread may close its end before we ask the kernel about it."""
    known.note_closings()
    return bool(known._closings) or not all(peers._is_open(one) for one, _peer in known._known.values())


def _leads_to_all(known: peers.Peers) -> bool:
    return {peer.rank for _one, peer in known._known.values()} == set(range(dist.get_world_size())) - {
        dist.get_rank()
    }


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connections_of_destroyed_groups_name_nobody(three_ranks: Ranks) -> None:
    assert three_ranks(names_nobody) == [[], [], []]
