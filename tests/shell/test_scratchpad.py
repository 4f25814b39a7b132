"""Barriers of scripts: what becomes of one when a call of it fails, and how many there may be."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from served import agents, soon

from rendezvous.client.channel import open_channel
from rendezvous.client.credential_files import ClientOptions
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.agent_stream import ServiceLimits
from rendezvous.service.server import Server, ServerOptions
from rendezvous.store.open import MemoryStore
from rendezvous.store.protocol import KEYS_PER_JOB
from rendezvous.values.events import Waiting
from rendezvous.values.types import JobSpec

BUSY, LATE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED


class Desk:
    """A service in this process, with the jobs "one" and "two"."""

    def __init__(self, endpoint: str, store: MemoryStore) -> None:
        self.endpoint, self.store = endpoint, store

    async def enter(self, name: str, job: str = "one", member: str = "m", **more: Any) -> Any:
        """The answer, or the code of the refusal."""
        fields = {"parties": 1, "wait_s": 0.05} | more
        request = pb.EnterBarrierRequest(job_id=job, name=name, member=member, **fields)
        async with open_channel(self.endpoint, ClientOptions()) as channel:
            call: Any = channel.unary_unary("/rendezvous.v1.Scratchpad/EnterBarrier")
            try:
                answer = await call(request.SerializeToString(), timeout=60)
            except grpc.RpcError as error:
                return error.code()
            return pb.EnterBarrierResponse.FromString(answer).arrived

    async def stay(self, name: str, other: str, other_job: str) -> asyncio.Task[Any]:
        """A call that is inside the barrier `name`, where only one is permitted: another one is refused."""
        call = asyncio.ensure_future(self.enter(name, parties=2, wait_s=60.0))
        while await self.enter(other, other_job, parties=2) is not BUSY:
            if call.done():  # it came while the other one was inside
                call = asyncio.ensure_future(self.enter(name, parties=2, wait_s=60.0))
        return call


async def served(limits: ServiceLimits, story: Callable[[Desk], Awaitable[None]]) -> None:
    store = MemoryStore()
    server = Server(store, ServerOptions(("127.0.0.1:0",), limits=limits))
    await server.start()
    endpoint = f"127.0.0.1:{server.ports[0]}"
    try:
        async with (
            agents(endpoint, JobSpec("one", 2, 2), ["a"]) as (one,),
            agents(endpoint, JobSpec("two", 2, 2), ["a"]) as (two,),
        ):
            await one.expect(Waiting)
            await two.expect(Waiting)
            await story(Desk(endpoint, store))
    finally:
        await server.close()


def test_a_barrier_whose_write_failed_is_removed() -> None:
    async def story(desk: Desk) -> None:
        values = desk.store.values("one")
        for n in range(KEYS_PER_JOB):
            await values.put(str(n), b"")
        assert await desk.enter("first") is BUSY, "there is no room for the mark that it was passed"
        assert await desk.enter("second", parties=2) is LATE, "the first barrier does not count any more"
        await values.delete("0")
        assert await desk.enter("first") == 1, "entering again passes"

    soon(served(ServiceLimits(barriers_per_job=1), story))


def test_barriers_of_one_job_do_not_use_up_those_of_another() -> None:
    async def story(desk: Desk) -> None:
        inside = await desk.stay("x", "y", "one")
        assert await desk.enter("y", job="two", parties=2) is LATE
        assert await desk.enter("x", member="n", parties=2) == 2
        assert await inside == 2
        assert await desk.enter("y") == 1

    soon(served(ServiceLimits(barriers_per_job=1), story))


def test_all_barriers_together_are_bounded() -> None:
    async def story(desk: Desk) -> None:
        inside = await desk.stay("x", "y", "two")
        assert await desk.enter("x", member="n", parties=2) == 2
        assert await inside == 2

    soon(served(ServiceLimits(barriers=1), story))


def test_a_member_counts_while_it_waits() -> None:
    """One that has given up is not in the barrier, so the others do not pass without it."""

    async def story(desk: Desk) -> None:
        first = asyncio.ensure_future(desk.enter("x", member="1", parties=3, wait_s=60.0))
        assert await desk.enter("x", member="2", parties=3) is LATE
        for number in range(20):
            assert await desk.enter("x", member=f"gave up {number}", parties=3) is LATE
        assert await desk.enter("x", member="3", parties=3) is LATE
        assert not first.done()
        again = asyncio.ensure_future(desk.enter("x", member="2", parties=3, wait_s=60.0))
        assert await desk.enter("x", member="3", parties=3, wait_s=60.0) == 3
        assert [await first, await again] == [3, 3]

    soon(served(ServiceLimits(), story))


def test_calls_of_one_client_wait_for_their_turn() -> None:
    async def story(desk: Desk) -> None:
        began = asyncio.get_running_loop().time()
        for number in range(4):
            assert await desk.enter(f"{number}") == 1
        assert asyncio.get_running_loop().time() - began >= 3 / 20.0

    soon(served(ServiceLimits(calls_per_s=20.0, call_burst=1), story))
