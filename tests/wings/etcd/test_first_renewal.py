"""A lease is renewed by the first answer, from whichever member, counted from its own request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from ddp_launch_wings.etcd import owner as etcd_owner
from ddp_launch_wings.etcd.client import NotFound, Unreachable
from rendezvous.pb import etcd_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ddp_launch_wings.etcd.client import EtcdClient


class Members:
    """`answer` is called with the number of the request. `asked`: which member each request went to."""

    def __init__(self, answer: Callable[[int], Awaitable[float]]) -> None:
        self._answer = answer
        self._at = 0
        self.asked: list[int] = []

    async def call(self, method: Any, request: pb.LeaseKeepAliveRequest, **limits: float) -> Any:
        self.asked.append(self._at)
        return pb.LeaseKeepAliveResponse(ID=request.ID, TTL=int(await self._answer(len(self.asked))))

    def member(self) -> int:
        return self._at

    def switch_from(self, member: int) -> None:
        assert member == self._at
        self._at += 1

    def renewal(self) -> tuple[float, float] | None:
        return asyncio.run(etcd_owner.first_renewal(cast("EtcdClient", self), 7))


@pytest.fixture(autouse=True)
def sent_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request is sent at 1, the second at 2, and so on."""
    times = iter(range(1, 100))
    monkeypatch.setattr(etcd_owner, "clock", lambda: float(next(times)))
    monkeypatch.setattr(etcd_owner, "_NEXT_RENEWAL_AFTER_S", 0.01)


def test_an_answer_that_comes_after_the_next_request_counts_from_its_own() -> None:
    third = asyncio.Event()

    async def answer(number: int) -> float:
        if number == 3:
            third.set()
        await (third.wait() if number == 1 else asyncio.Event().wait())
        return 2.0

    members = Members(answer)
    assert members.renewal() == (1.0, 2.0)
    assert members.asked[:3] == [0, 1, 2]


def test_a_silent_member_is_passed_by() -> None:
    async def answer(number: int) -> float:
        if number == 1:
            await asyncio.Event().wait()
        return 2.0

    members = Members(answer)
    assert members.renewal() == (2.0, 2.0)
    assert members.asked == [0, 1]


def test_without_an_answer_it_ends_soon() -> None:
    async def answer(number: int) -> float:
        raise Unreachable

    members = Members(answer)
    assert members.renewal() is None
    assert len(members.asked) == 4


def test_a_refusal_is_an_error() -> None:
    async def answer(number: int) -> float:
        raise NotFound("no such lease")

    with pytest.raises(NotFound):
        Members(answer).renewal()
