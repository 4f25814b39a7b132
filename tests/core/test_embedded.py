from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from job_story import agent, spec

from rendezvous.embedded import EmbeddedRendezvous
from rendezvous.rounds.view import view_of
from rendezvous.service.owner import JobOwner
from rendezvous.store.open import MemoryJobStore
from rendezvous.store.protocol import Conflict
from rendezvous.values.events import (
    AgentJoined,
    AgentStopped,
    Assigned,
    Ended,
    RankFailed,
    RanksFinished,
    Stop,
    StoreAt,
    StoreOpened,
    ToAgent,
    Waiting,
)
from rendezvous.values.job_state import JobState
from rendezvous.values.types import AgentId, Cause, FailureClass, JobSpec, NodeFacts, StoreAddress


def joined(node: str, job: JobSpec) -> AgentJoined:
    return AgentJoined(agent(node), job, NodeFacts(node, "127.0.0.1", 1))


STORE = StoreAddress("127.0.0.1", 4242)


async def one_node_restarts_and_finishes() -> None:
    session, me, job = EmbeddedRendezvous().connect(agent("a")), agent("a"), spec(1)
    session.send(joined("a", job))
    assert isinstance(await session.receive(), Assigned)
    session.send(StoreOpened(me, 1, STORE))
    assert await session.receive() == StoreAt(1, STORE)
    cause = Cause("a", 0, 0, FailureClass.SIGNAL, "killed by SIGKILL", 137, ran_s=9.0)
    session.send(RankFailed(me, 1, cause))
    assert isinstance(await session.receive(), Stop)
    session.send(AgentStopped(me, 1))
    assert isinstance(await session.receive(), Assigned)
    session.send(StoreOpened(me, 2, STORE))
    session.send(RanksFinished(me, 2))
    assert isinstance(await session.receive(), StoreAt)
    assert isinstance(await session.receive(), Ended)
    await session.close()


async def silent_agents_count_as_alive() -> None:
    rendezvous = EmbeddedRendezvous()
    job = spec(2, lease_s=0.02)
    sessions = [rendezvous.connect(agent(n)) for n in "ab"]
    for node, session in zip("ab", sessions, strict=True):
        session.send(joined(node, job))
    assert isinstance(await sessions[0].receive(), Waiting)
    assert isinstance(await sessions[0].receive(), Assigned)
    with pytest.raises(TimeoutError):  # several leases long, nothing happens
        await asyncio.wait_for(sessions[0].receive(), 0.15)
    await sessions[1].close()  # ... until one goes
    assert isinstance(await sessions[0].receive(), Stop)
    await sessions[0].close()


async def heartbeats_count_before_leases_are_renewed() -> None:
    """Leases are renewed at their deadline only: until then, each node would seem to be silent."""
    now = asyncio.get_running_loop().time() + 14.0  # nearly a lease later
    rendezvous = EmbeddedRendezvous()
    session = rendezvous.connect(agent("a"))
    session.send(joined("a", spec(1)))
    assert isinstance(await session.receive(), Assigned)
    assert view_of("job", rendezvous.state, now).nodes[0].heard_s > 10
    assert view_of("job", rendezvous.state, now, heard=rendezvous.heard(now)).nodes[0].heard_s == 0
    await session.close()
    is_in = asyncio.Event()
    owner = JobOwner(
        MemoryJobStore(),
        lambda _agent, _message: None,
        note=lambda _event, _before, after: after.members and is_in.set(),
    )
    task = asyncio.create_task(owner.run())
    owner.post(joined("a", spec(1)))
    await asyncio.wait_for(is_in.wait(), 60)
    owner.note_contact(agent("a"))
    heard = owner.heard(now)
    assert heard["a"] >= owner.state.leases["a"]
    assert view_of("job", owner.state, now, heard=heard).nodes[0].heard_s == now - heard["a"]
    task.cancel()
    await asyncio.wait([task])


async def an_owner_that_breaks_says_so() -> None:
    session = EmbeddedRendezvous().connect(agent("a"))
    session.send("no event at all")  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        await session.receive()
    await session.close()


class Contested(MemoryJobStore):
    """Before the write that would seal, somebody else writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts = 0

    async def save(self, state: JobState, expected_version: int) -> int:
        if state.generation == 1 and not self.conflicts:
            self.conflicts += 1
            await super().save(JobState(), expected_version)
            raise Conflict
        return await super().save(state, expected_version)


async def a_lost_write_is_neither_kept_nor_told() -> None:
    told: list[tuple[AgentId, ToAgent]] = []
    store, done = Contested(), asyncio.Event()

    def tell(to: AgentId, message: ToAgent) -> None:
        told.append((to, message))
        done.set()

    owner = JobOwner(store, tell)
    running = asyncio.create_task(owner.run())
    owner.post(joined("a", spec(1)))
    await done.wait()
    assert store.conflicts == 1
    assert [type(m) for _, m in told] == [Assigned]
    assert owner.state == (await store.load())[0]
    running.cancel()
    await asyncio.wait([running])


async def a_round_trip_waits_for_no_timer() -> None:
    """A few turns of the loop answer it: each of them runs what is ready, and none waits."""
    session, loop = EmbeddedRendezvous().connect(agent("a")), asyncio.get_running_loop()
    for _ in range(50):  # a join that is said again is answered again
        session.send(joined("a", spec(1)))
        answer = loop.create_task(session.receive())
        for _ in range(20):
            await asyncio.sleep(0)
        assert answer.done()
    await session.close()


@pytest.mark.parametrize(
    "story",
    [
        one_node_restarts_and_finishes,
        silent_agents_count_as_alive,
        heartbeats_count_before_leases_are_renewed,
        an_owner_that_breaks_says_so,
        a_lost_write_is_neither_kept_nor_told,
        a_round_trip_waits_for_no_timer,
    ],
    ids=lambda story: story.__name__,
)
def test_embedded(story) -> None:
    asyncio.run(story())


def test_it_needs_neither_grpc_nor_torch() -> None:
    wanted = "[m for m in ('grpc', 'torch', 'google.protobuf') if m in sys.modules]"
    code = f"import sys, rendezvous.embedded; print({wanted})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def an_owner_begins() -> None:
    store, begun = MemoryJobStore(), asyncio.Event()
    before = await store.load()
    owner = JobOwner(store, lambda *_: None, note=lambda *_: begun.set())
    task = asyncio.get_running_loop().create_task(owner.run())
    await begun.wait()
    with pytest.raises(Conflict):
        await store.save(*before)
    task.cancel()


def test_no_write_of_an_earlier_owner_lands_once_a_new_one_has_begun() -> None:
    asyncio.run(asyncio.wait_for(an_owner_begins(), 10.0))
