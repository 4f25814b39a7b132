"""The store of a generation listens before its ranks start, and is served behind the fork of the first one."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from launcher.template import loop
from launcher.template.messages import Keep, KeeperEnded, Keeping, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"


class Played:
    """A zygote that does not fork: `forks` has the time of each fork."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Report] = []
        self.forks: list[float] = []
        self.obstacle = ""
        self.keepers = loop.Keepers(lambda: None, self.told.append)
        monkeypatch.setattr(loop, "fork", self.fork)

    def fork(self) -> tuple[int, str]:
        self.forks.append(time.monotonic())
        return (-1, self.obstacle) if self.obstacle else (1 << 30, "")

    def port(self) -> int:
        (answer,) = self.told
        assert isinstance(answer, Keeping)
        assert answer.is_kept
        return answer.port


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    found = Played(monkeypatch)
    yield found
    found.keepers.forget()


def test_ranks_can_connect_before_a_process_serves_the_store(played: Played) -> None:
    played.keepers.listen(Keep(1, HOST, 0))
    with socket.create_connection((HOST, played.port()), timeout=60.0):
        assert not played.forks
        played.keepers.rank_started()
        assert len(played.forks) == len(played.keepers) == 1
    played.keepers.rank_started()
    assert len(played.forks) == 1, "the next rank of the node"
    assert played.keepers.wait_s() is None


def test_without_a_rank_on_this_node_it_is_served_a_little_later(played: Played) -> None:
    began = time.monotonic()
    played.keepers.listen(Keep(1, HOST, 0))
    while not played.forks:
        played.keepers.turn()
        if (wait_s := played.keepers.wait_s()) is not None:
            time.sleep(wait_s)  # as the zygote's loop does
    assert played.forks[0] - began >= loop._WAIT_FOR_RANK_S
    assert played.keepers.wait_s() is None


def test_nobody_can_connect_to_the_store_of_a_world_that_is_over(played: Played) -> None:
    played.keepers.listen(Keep(1, HOST, 0))
    played.keepers.give_up()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, played.port()), timeout=60.0)
    played.keepers.rank_started()
    assert not played.forks


def test_a_requested_port_is_free_for_the_next_generation(played: Played) -> None:
    played.keepers.listen(Keep(1, HOST, 0))
    port = played.port()
    played.keepers.listen(Keep(2, HOST, port))
    assert played.told[1:] == [Keeping(2, port, True)]


def test_a_store_without_a_process_is_lost(played: Played) -> None:
    """Otherwise its ranks would try to connect for minutes."""
    played.obstacle = "Resource temporarily unavailable"
    played.keepers.listen(Keep(1, HOST, 0))
    played.keepers.rank_started()
    words = "its process cannot be started: Resource temporarily unavailable"
    assert played.told[1:] == [KeeperEnded(1, words)]
    assert len(played.keepers) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, played.told[0].port), timeout=60.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(("is_expected", "n_told"), [(False, 1), (True, 0)])
def test_the_end_of_a_keeper_is_told_if_no_sweep_has_ended_it(
    played: Played, is_expected: bool, n_told: int
) -> None:
    played.keepers.listen(Keep(3, HOST, 0))
    played.keepers.rank_started()
    played.keepers.ended(1 << 30, signal.SIGKILL, is_expected)
    assert played.told[1:] == [KeeperEnded(3, "killed by SIGKILL")][:n_told]
    played.keepers.ended(os.getpid(), 0, is_expected=False)
    assert len(played.told) == 1 + n_told, "a child that keeps no store"
