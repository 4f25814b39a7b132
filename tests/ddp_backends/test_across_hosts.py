"""hier: ranks that count as living on several hosts, with a real ring of TCP connections between these."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
import torch
import training
import trouble
from crew import SOON_S, Crew

HOSTS = {"2+2": "aabb", "1+1": "ab", "1+3": "abbb", "mixed order": "abba", "three": "abc", "one": "aa"}


def crew_of(hosts, backend="hier"):
    return Crew(len(hosts), backend, [{"DDP_HOST_KEY": host, "MASTER_ADDR": "127.0.0.1"} for host in hosts])


@pytest.fixture(scope="module", params=HOSTS.values(), ids=HOSTS.keys())
def hosts(request):
    with crew_of(request.param) as ranks:
        assert not ranks.problems
        yield ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_all_reduce_and_average(hosts, dtype):
    sizes = [0, 1, 2, 3, 17, 5000, 70_001, 600_001]
    if dtype is torch.int64:
        assert hosts.run(training.whole_numbers, sizes) == [True] * hosts.size
    else:
        digests = hosts.run(training.totals, sizes, dtype)
        assert digests == [digests[0]] * hosts.size


def test_training(hosts):
    digests = hosts.run(training.torchs_ddp)
    assert digests == [digests[0]] * hosts.size
    hosts.run(training.past_the_core)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_death_on_one_host_is_heard_on_all(victim, tmp_path):
    with crew_of("aabb") as ranks:
        others = [rank for rank in range(4) if rank != victim]
        ranks.tell(trouble.collectives_until_killed, "average", str(tmp_path / "ready"), ranks=[victim])
        ranks.tell(trouble.collectives_for_ever, "average", ranks=others)
        deadline = time.monotonic() + 150
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        killed = time.monotonic()
        ranks.kill(victim)
        neighbour = victim ^ 1
        for rank, (at, said) in zip(others, ranks.answers(others), strict=True):
            assert at - killed < SOON_S
            assert rank != neighbour or f"rank {victim} died" in said or "lost its connection" in said


def test_shm_is_for_one_host():
    with crew_of("aab", "shm") as ranks:
        assert len(ranks.problems) == 3
        assert {each.kind for each in ranks.problems} == {"ValueError"}
        assert "use hier" in ranks.problems[0].text


def test_strangers_are_turned_away():
    """Somebody who connects to a rank's port and does not know the secret, or says nothing, is no neighbour."""
    from ddp.groups import ring

    first, second = ring.open_port(), ring.open_port()
    stranger = socket.create_connection((first.address, first.number))
    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n      ")
    impostor = socket.create_connection((first.address, first.number))
    impostor.sendall(ring.hello(second.secret, 1))
    friend = socket.create_connection((first.address, first.number))
    friend.sendall(ring.hello(first.secret, 1))
    links = ring.join(first, 0, (second.address, second.number, second.secret), 1, 20)
    assert links.previous.getpeername() == friend.getsockname()
    for turned_away in (stranger, impostor):
        with contextlib.suppress(ConnectionResetError):
            assert turned_away.recv(1) == b""
    for each in (links, stranger, impostor, friend, first.listener, second.listener):
        each.close()
