"""Connections that are shut down release who waits for them, at whatever moment of a collective."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp.telemetry import peers

if TYPE_CHECKING:
    import socket

    from ranks import Ranks

ROUNDS = 15  # before the repair, one rank in ten stayed in its collective
_WITHIN_S, _CUT_WITHIN_S = 20.0, 0.3
_held: list[socket.socket] = []  # of the last task, which all ranks have finished before the next one


def is_released(rank: int, number: int) -> str:
    """Reduce in a loop, and cut the connections in the middle of it. What the rank says if it does not come out."""
    for end in _held:
        end.close()
    chance = random.Random(3 * number + rank)
    last = chance.randrange(50, 250)
    is_there, error = threading.Event(), list[RuntimeError]()

    def reduce() -> None:
        tensor = torch.zeros(128)
        steps = 0
        try:
            while True:
                dist.all_reduce(tensor)
                steps += 1
                if steps == last:
                    is_there.set()
        except RuntimeError as raised:
            error.append(raised)
            is_there.set()

    thread = threading.Thread(target=reduce, daemon=True)
    thread.start()
    is_there.wait(_CUT_WITHIN_S)  # it is not there if a peer was first, for which it waits
    n_cut, held = peers.shut_down(peers.connections())
    _held[:] = held
    thread.join(_WITHIN_S)
    return "" if error else f"rank {rank} has cut {n_cut} connections, and is still in its collective"


def test_a_collective_of_gloo_ends(three_ranks: Ranks) -> None:
    for number in range(ROUNDS):
        assert three_ranks(is_released, number) == [""] * 3
