"""The zygote reaps ranks in the order in which they ended, also if they end while it looks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from launcher.template.loop import Endings, has_ended

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def children() -> Iterator[list[int]]:
    pids = [_child() for _ in range(4)]
    yield pids
    for pid in pids:
        _end(pid)
        os.waitpid(pid, 0)


def _child() -> int:
    if pid := os.fork():
        return pid
    while True:
        signal.pause()


def _end(*pids: int) -> None:
    """One after the other."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class _Late(Endings):
    """Two ranks end just after the first look."""

    def __init__(self, *late: int) -> None:
        super().__init__()
        self._late = late

    def _take(self) -> list[int]:
        found = super()._take()
        late, self._late = self._late, ()
        _end(*late)
        return found


def test_the_order_is_that_of_the_ends(children: list[int]) -> None:
    endings = Endings()
    for pid in children:
        endings.watch(pid)
    assert endings.next() == 0
    _end(children[2], children[0], children[3])
    assert [endings.next() for _ in range(3)] == [children[2], children[0], children[3]]


def test_the_order_is_that_of_the_ends_between_two_looks(children: list[int]) -> None:
    endings = _Late(children[3], children[1])
    for pid in children:
        endings.watch(pid)
    assert [endings.next(), endings.next()] == [children[3], children[1]]


def test_a_child_that_is_no_rank_is_reaped_too(children: list[int]) -> None:
    _end(children[0])
    assert Endings().next() == children[0]
    assert has_ended(children[0])
    assert not has_ended(children[1])
