"""hier: ranks that count as living on several hosts, with a real ring of TCP connections between these."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
import torch
import torch.distributed as dist
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


F32, F64 = torch.float32, torch.float64
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
USUAL = (8, F32, SUM)
SUM_OF_8 = "all-reduce of 8 x float32 (sum)"


@pytest.fixture(scope="module", params=["ab", "abc", "aabb"])
def several_hosts(request):
    with crew_of(request.param) as ranks:
        assert not ranks.problems
        yield request.param, ranks


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ((12, F32, SUM), "all-reduce of 12 x float32 (sum)"),
        ((3_000_000, F32, SUM), "all-reduce of 3000000 x float32 (sum)"),
        ((0, F32, SUM), "all-reduce of 0 x float32 (sum)"),
        ((8, F64, SUM), "all-reduce of 8 x float64 (sum)"),
        ((8, F32, MAX), "all-reduce of 8 x float32 (maximum)"),
        ((0, F32, None), "barrier"),
    ],
    ids=str,
)
@pytest.mark.parametrize("odd_host", [0, -1])
def test_hosts_that_disagree_are_named_on_all_ranks(several_hosts, odd_host, odd, words):
    hosts, ranks = several_hosts
    mine = [odd if host == hosts[odd_host] else USUAL for host in hosts]
    for said in ranks.run(trouble.disagree_across_hosts, mine):
        assert "the ranks disagree: " in said
        assert f"called {words}" in said
        assert f"called {SUM_OF_8}" in said


def test_every_host_means_something_else():
    with crew_of("abcd") as ranks:
        mine = [(size, F32, SUM) for size in (5, 500_000, 7, 8)]
        for said in ranks.run(trouble.disagree_across_hosts, mine):
            for rank, (size, *_) in enumerate(mine):
                assert f"rank {rank} on {socket.gethostname()} called all-reduce of {size} x float32" in said


def test_ranks_of_one_host_disagree_and_the_others_hear_of_it():
    with crew_of("aabc") as ranks:
        answers = ranks.run(trouble.disagree_across_hosts, [USUAL, (12, F32, SUM), USUAL, USUAL])
    assert all(
        "rank 0 called all-reduce of 8 x float32, rank 1 all-reduce of 12" in said for said in answers[:2]
    )
    assert all("ranks 0-1 on " in said and "on its own ranks" in said for said in answers[2:])


@pytest.mark.parametrize("absent", [0, -1])
def test_a_host_that_does_not_come_is_named(several_hosts, absent):
    hosts, ranks = several_hosts
    missing = [rank for rank, host in enumerate(hosts) if host == hosts[absent]]
    name = f"rank {missing[0]} on " if len(missing) == 1 else f"one of ranks {missing[0]}-{missing[-1]} on "
    for rank, said in enumerate(ranks.run(trouble.wait_for_other_hosts, missing, 3.0)):
        assert rank in missing or f"{name}{socket.gethostname()} has not joined all-reduce" in said


def test_shm_is_for_one_host():
    with crew_of("aab", "shm") as ranks:
        assert len(ranks.problems) == 3
        assert {each.kind for each in ranks.problems} == {"WrongValue"}
        assert "hier" in ranks.problems[0].text


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
    for each in (links, stranger, impostor, friend, first.socket, second.socket):
        each.close()
