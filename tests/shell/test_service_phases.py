"""The service is killed in each phase of a job and comes back on the same file: what was told stands."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from ports import free_port
from served import Agent, Service, agents, serving, soon

from rendezvous.values.events import (
    AgentLeft,
    AgentStopped,
    Assigned,
    Ended,
    RankFailed,
    RanksFinished,
    RefusalKind,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.types import Cause, DecisionKind, FailureClass, JobSpec, RestartBudget, StoreAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

_TWO = JobSpec("job", 2, 2, "train.py", budget=RestartBudget(3), lease_s=60.0)


class Mortal:
    """One address and one file, and a service there that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._store = ("--store", f"file:{folder}/jobs")
        self.endpoint = f"127.0.0.1:{free_port()}"  # one that nobody is given while the service is away
        self._service = Service("--listen", self.endpoint, *self._store)
        self._service.await_endpoint()

    async def dies_and_comes_back(self) -> None:
        await asyncio.to_thread(self._service.end, signal.SIGKILL)
        self._service = Service("--listen", self.endpoint, *self._store)
        await asyncio.to_thread(self._service.await_endpoint)

    def close(self) -> None:
        self._service.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Mortal]:
    mortal = Mortal(tmp_path)
    yield mortal
    mortal.close()


@asynccontextmanager
async def both(service: Mortal) -> AsyncIterator[tuple[Agent, Agent]]:
    """The first of them has node rank 0."""
    async with agents(service.endpoint, _TWO, ["a", "b"]) as (a, b):
        yield a, b


def open_store(agent: Agent, generation: int) -> None:
    agent.session.send(StoreOpened(agent.id, generation, StoreAddress("127.0.0.1", 1234)))


async def start(agent: Agent, generation: int) -> None:
    """Where an older one stands may be told again before."""
    while (await agent.expect(Assigned)).assignment.generation < generation:
        pass
    assert agent.assignment is not None
    assert agent.assignment.generation == generation
    if agent.assignment.node_rank == 0:
        open_store(agent, generation)
    while (await agent.expect(StoreAt)).generation < generation:
        pass


def fail(agent: Agent, generation: int) -> None:
    assert agent.assignment is not None
    rank = agent.assignment.rank_offset
    cause = Cause(agent.id.node, rank, 0, FailureClass.USER_EXCEPTION, "ValueError: bad", 1, ran_s=60.0)
    agent.session.send(RankFailed(agent.id, generation, cause))


async def finish(generation: int, restarts: int, *all_agents: Agent) -> None:
    for agent in all_agents:
        agent.session.send(RanksFinished(agent.id, generation))
    for agent in all_agents:
        outcome = (await agent.expect(Ended)).outcome
        assert (outcome.succeeded, outcome.restarts) == (True, restarts)


def test_forming(service: Mortal) -> None:
    async def story() -> None:
        async with agents(service.endpoint, _TWO, ["a"]) as (a,):
            await a.expect(Waiting)
            await service.dies_and_comes_back()
            async with agents(service.endpoint, _TWO, ["b"]) as (b,):
                await asyncio.gather(start(a, 1), start(b, 1))
                await finish(1, 0, a, b)

    soon(story())


def test_sealed(service: Mortal) -> None:
    """Nobody has opened the generation's store yet."""

    async def story() -> None:
        async with both(service) as (a, b):
            await asyncio.gather(a.expect(Assigned), b.expect(Assigned))
            await service.dies_and_comes_back()
            await asyncio.gather(start(a, 1), start(b, 1))
            await finish(1, 0, a, b)

    soon(story())


def test_running(service: Mortal) -> None:
    """Nothing but where they stand is told anew; and what fails meanwhile is decided once."""

    async def story() -> None:
        async with both(service) as (a, b):
            await asyncio.gather(start(a, 1), start(b, 1))
            await service.dies_and_comes_back()
            for agent in (a, b):
                assert (await agent.expect(Assigned)).assignment.generation == 1
                again = await agent.session.receive()
                assert isinstance(again, StoreAt)
            fail(b, 1)
            stops = [await agent.expect(Stop) for agent in (a, b)]
            assert [stop.decision.kind for stop in stops] == [DecisionKind.RESTART] * 2
            for agent in (a, b):
                agent.session.send(AgentStopped(agent.id, 1))
            await asyncio.gather(start(a, 2), start(b, 2))
            await finish(2, 1, a, b)

    soon(story())


@pytest.mark.parametrize("stopped_before", [0, 1], ids=["nobody has stopped", "one has stopped"])
def test_stopping(service: Mortal, stopped_before: int) -> None:
    async def story() -> None:
        async with both(service) as (a, b):
            await asyncio.gather(start(a, 1), start(b, 1))
            fail(b, 1)
            before = [await agent.expect(Stop) for agent in (a, b)]
            for agent in (a, b)[:stopped_before]:
                agent.session.send(AgentStopped(agent.id, 1))
            await service.dies_and_comes_back()
            if not stopped_before:
                assert [await agent.expect(Stop) for agent in (a, b)] == before
            for agent in (a, b)[stopped_before:]:
                agent.session.send(AgentStopped(agent.id, 1))
            await asyncio.gather(start(a, 2), start(b, 2))
            await finish(2, 1, a, b)

    soon(story())


def test_forming_again(service: Mortal) -> None:
    """A replacement is awaited; it comes when the service is back."""

    async def story() -> None:
        async with agents(service.endpoint, _TWO, ["a"]) as (a,):
            async with agents(service.endpoint, _TWO, ["b"]) as (b,):
                await asyncio.gather(start(a, 1), start(b, 1))
                b.session.send(AgentLeft(b.id, "SIGTERM"))
            assert (await a.expect(Stop)).decision.kind is DecisionKind.WAIT
            a.session.send(AgentStopped(a.id, 1))
            await a.expect(Waiting)
            await service.dies_and_comes_back()
            async with agents(service.endpoint, _TWO, ["c"]) as (c,):
                await asyncio.gather(start(a, 2), start(c, 2))
                await finish(2, 1, a, c)

    soon(story())


def test_ended(service: Mortal) -> None:
    async def story() -> None:
        async with both(service) as (a, b):
            await asyncio.gather(start(a, 1), start(b, 1))
            await finish(1, 0, a, b)
        await service.dies_and_comes_back()
        async with agents(service.endpoint, _TWO, ["a"], life="2") as (late,):
            assert (await late.expect(Refused)).kind is RefusalKind.JOB_OVER

    soon(story())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_up_to_its_last_moment_change_nothing(signum: signal.Signals) -> None:
    with serving() as service:
        assert service.hail(signum) == 0, service.log
        assert "Traceback" not in "".join(service.log)
