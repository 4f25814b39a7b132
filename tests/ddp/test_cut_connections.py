"""Connections that are shut down release who waits for them, at whatever moment of a collective."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp.telemetry import peers

if TYPE_CHECKING:
    from ranks import Ranks

ROUNDS = 15  # before the repair, one rank in ten stayed in its collective
_WITHIN_S, _CUT_WITHIN_S = 60.0, 0.3
_held: list[socket.socket] = []  # of the last task, which all ranks have finished before the next one


def is_released(rank: int, number: int) -> str:
    """Reduce in a loop, and cut the connections in the middle of it. What the rank says if it does not come out."""
    for end in _held:
        end.close()
    chance = random.Random(3 * number + rank)
    last = chance.randrange(50, 250)
    is_there, error = threading.Event(), list[str]()

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
            error.append(str(raised))  # its traceback would keep the group, whose thread may use a whole core
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


def leaves_without_knowing_its_peers(rank: int) -> str:
    """Only this group is cut: not the default one, and not what the script watches with an epoll of its own."""
    os.environ.pop("MASTER_PORT", None)  # the store of these tests stays
    known = peers.Peers()
    with known.gloo.creating():
        group = dist.new_group(backend="gloo")
    dist.barrier()  # nobody is cut while it creates the group
    left = threading.Event()

    def reduce() -> None:
        try:
            while True:
                dist.all_reduce(torch.zeros(128), group=group)
        except RuntimeError:
            left.set()

    with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as mine:
        with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
            mine.register(there)
            threading.Thread(target=reduce, daemon=True).start()
            known.shut_down_all()
            has_left = left.wait(_WITHIN_S)
            here.sendall(b"it works")
            works = there.recv(100) == b"it works"
    known.begin_again()
    return f"rank {rank}: has left: {has_left}, other one works: {works}"


def test_the_connections_of_gloo_are_known_before_its_peers_are(three_ranks: Ranks) -> None:
    """Another failure may come at once. And in large worlds peers are never known."""
    said = three_ranks(leaves_without_knowing_its_peers)
    assert said == [f"rank {rank}: has left: True, other one works: True" for rank in range(3)]
    assert three_ranks(is_there) == [3.0] * 3


def leaves_a_message_unread(rank: int) -> str:
    """Rank 1 sends what rank 0 has given up, so its thread of Gloo cannot read it, also when the connection is cut."""
    os.environ.pop("MASTER_PORT", None)  # the store of these tests stays
    known = peers.Peers()
    with known.gloo.creating():
        group = dist.new_group(backend="gloo")
    store = dist.distributed_c10d._get_default_store()
    key = f"given up {group.group_name}"
    if rank == 1:
        store.get(key)
        work = dist.isend(torch.ones(1_000_000), 0, group=group)
        store.get(f"{key} over")
        del work
    spins = ""
    if rank == 0:
        work = dist.irecv(torch.zeros(1_000_000), 1, group=group)
        del work
        store.set(key, "")
        spins = _spins_until_cut(known)
        store.set(f"{key} over", "")
    dist.barrier()
    known.begin_again()
    dist.destroy_process_group(group)
    return spins


def _spins_until_cut(known: peers.Peers) -> str:
    before = _ticks_of_gloo()
    give_up_at = time.monotonic() + 60
    while sum(_ticks_of_gloo().values()) < sum(before.values()) + 20 and time.monotonic() < give_up_at:
        pass
    if time.monotonic() >= give_up_at:
        return "the message was read"
    known.shut_down_all()
    cut, began = _ticks_of_gloo(), time.process_time()
    while time.process_time() < began + 0.3:
        pass
    used = {name: ticks - cut[name] for name, ticks in _ticks_of_gloo().items() if ticks - cut[name] > 3}
    return f"{used} ticks of CPU time after the cut" if used else ""


def _ticks_of_gloo() -> dict[str, int]:
    """The CPU time that each thread of Gloo has used."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        text = Path(f"/proc/self/task/{name}/stat").read_text()
        if "(gloo" in text:
            fields = text.rpartition(")")[2].split()
            found[name] = int(fields[11]) + int(fields[12])
    return found


def test_a_message_that_gloo_cannot_read_does_not_cost_a_core(three_ranks: Ranks) -> None:
    assert three_ranks(leaves_a_message_unread) == [""] * 3


def is_there(_rank: int) -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_store_that_its_host_has_left_is_not_used() -> None:
    """torch prints a warning with the stack of its thread if a call finds the connection closed."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as rank:
        rank.connect(server.getsockname())
        host, _address = server.accept()
        (ours,) = (one for one in peers.connections() if one.fd == rank.fileno())
        assert not peers.any_is_closed([ours])
        host.close()
        assert peers.any_is_closed([ours])
    assert peers.any_is_closed([ours])
