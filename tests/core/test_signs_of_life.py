"""Which agents count as alive: heartbeats are applied all at once; ranks that progress with other nodes count."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from rendezvous.machine import step
from rendezvous.rounds.admission import Cadence, after_progress, is_lost_early, renew_leases
from rendezvous.service.owner import JobOwner
from rendezvous.store.open import MemoryJobStore
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentStopped,
    Assigned,
    Ended,
    JobAborted,
    RankFailed,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import (
    AgentId,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    RestartBudget,
    StoreAddress,
)

LEASE_S = 0.4
DEADLINE_S = 60.0


def agent(node: str, incarnation: str = "1") -> AgentId:
    return AgentId(node, incarnation)


def joined(node: str, nodes: int = 2, lease_s: float = 3.0) -> AgentJoined:
    spec = JobSpec("job", nodes, nodes, budget=RestartBudget(3), lease_s=lease_s)
    return AgentJoined(agent(node), spec, NodeFacts(node, node, 1))


def members(*nodes: str) -> JobState:
    state = JobState()
    for node in nodes:
        state, _ = step(state, joined(node, nodes=9), 1.0)
    return state


def test_all_at_once_is_what_one_by_one_would_be() -> None:
    state = members("a", "b", "c")
    heard = {agent("c"): 2.5, agent("a"): 2.0}
    one_by_one = state
    for who, at in heard.items():
        one_by_one, _ = step(one_by_one, AgentHeard(who), at)
    assert dict(renew_leases(state, heard).leases.items()) == dict(one_by_one.leases.items())
    assert dict(one_by_one.leases.items()) == {"a": 2.0, "b": 1.0, "c": 2.5}


def test_strangers_and_earlier_lives_renew_nothing() -> None:
    state = members("a")
    assert renew_leases(state, {agent("x"): 2.0, agent("a", "0"): 2.0}) is state


def test_a_lease_is_never_shortened() -> None:
    state = members("a")
    assert renew_leases(state, {agent("a"): 0.5}).leases["a"] == 1.0


def running(*nodes: str, lease_s: float = 3.0) -> JobState:
    state = JobState()
    for node in nodes:
        state, _ = step(state, joined(node, len(nodes), lease_s), 1.0)
    state, _ = step(state, StoreOpened(agent(nodes[0]), 1, StoreAddress("a", 1)), 1.0)
    assert state.phase is Phase.RUNNING
    return state


def test_progress_of_one_node_renews_the_leases_of_the_whole_world() -> None:
    state, effects = step(running("a", "b"), AgentHeard(agent("a"), progress=True), 2.0)
    assert dict(state.leases.items()) == {"a": 2.0, "b": 2.0}
    assert not effects


def test_without_progress_a_heartbeat_counts_for_its_own_node() -> None:
    state, _ = step(running("a", "b"), AgentHeard(agent("a")), 2.0)
    assert dict(state.leases.items()) == {"a": 2.0, "b": 1.0}


def test_progress_of_a_node_outside_the_world_shows_nothing_about_the_world() -> None:
    state, _ = step(running("a", "b"), joined("late", 2), 1.5)
    state, _ = step(state, AgentHeard(agent("late"), progress=True), 2.0)
    assert dict(state.leases.items()) == {"a": 1.0, "b": 1.0, "late": 2.0}


def test_progress_before_the_ranks_run_renews_only_its_own_lease() -> None:
    state, _ = step(members("a", "b"), AgentHeard(agent("a"), progress=True), 2.0)
    assert dict(state.leases.items()) == {"a": 2.0, "b": 1.0}


# --- lost before the lease expires


def cadence(*reports: float) -> Cadence:
    """The ranks reported progress at these times."""
    found: Cadence | None = None
    for at in reports:
        found = after_progress(found, 1, at)
    assert found is not None
    return found


def every(seconds: float, last_at: float) -> Cadence:
    return cadence(*(seconds * n for n in range(int(last_at / seconds) + 1)))


@pytest.mark.parametrize(
    ("known", "limit_s"),
    [
        (every(1.0, 20.0), 4.0),
        (every(3.0, 21.0), 6.0),
        (every(7.0, 70.0), 14.0),
        (every(1.0, 14.0), math.inf),  # they may have been warming up
        (every(20.0, 600.0), math.inf),  # a step takes longer than the lease
        (cadence(*range(20), 39, *range(40, 60)), math.inf),  # an evaluation took 20 s, so the next one may
    ],
    ids=["regular", "steps-of-3-s", "steps-of-7-s", "young", "steps-of-20-s", "evaluates"],
)
def test_only_ranks_that_progressed_regularly_show_that_they_have_stopped(
    known: Cadence, limit_s: float
) -> None:
    assert known.limit_s(4.0, lease_s=15.0) == limit_s


def test_another_generation_begins_without_evidence() -> None:
    assert after_progress(every(1.0, 20.0), 2, 30.0) == Cadence(2, 30.0, 30.0)


@pytest.mark.parametrize(
    ("silent_since", "heard_at", "is_lost"),
    [
        (20.0, 24.0, True),
        (20.5, 24.4, False),  # not yet
        (20.0, 20.0, False),  # all agents are silent: the network, or the service itself
        (26.0, 40.0, False),  # the ranks had stopped before: they evaluate, and the agent is starved
        (15.0, 40.0, False),  # the ranks went on without the agent
    ],
)
def test_an_agent_is_lost_early_if_its_ranks_stopped_with_it(
    silent_since: float, heard_at: float, is_lost: bool
) -> None:
    state = running("a", "b", lease_s=15.0)
    assert is_lost_early(state, agent("b"), every(1.0, 20.0), silent_since, heard_at, 4.0) == is_lost


def stopping(failure: FailureClass) -> JobState:
    state, _ = step(
        running("a", "b", lease_s=15.0),
        RankFailed(agent("a"), 1, Cause("a", 0, 0, failure, "it failed", 1)),
        30.0,
    )
    assert state.phase is Phase.STOPPING
    return state


def test_a_silent_agent_is_lost_early_if_others_lost_connections_and_wait_for_it() -> None:
    state = stopping(FailureClass.CONSEQUENCE)
    assert is_lost_early(state, agent("b"), None, 26.0, 30.0, 4.0)
    assert not is_lost_early(state, agent("b"), None, 26.1, 30.0, 4.0)
    assert not is_lost_early(state, agent("x"), None, 20.0, 30.0, 4.0)
    state, _ = step(state, AgentStopped(agent("b"), 1), 30.0)
    assert not is_lost_early(state, agent("b"), None, 26.0, 30.0, 4.0), "nobody waits for it"


def test_without_a_lost_connection_a_silent_agent_keeps_its_lease() -> None:
    """It may be busy: ranks of a job that stops save checkpoints."""
    state = running("a", "b", lease_s=15.0)
    assert not is_lost_early(state, agent("b"), None, 20.0, 30.0, 4.0)
    aborted, _ = step(state, JobAborted("enough"), 30.0)
    for each in (aborted, stopping(FailureClass.USER_EXCEPTION)):
        assert not is_lost_early(each, agent("b"), None, 20.0, 30.0, 4.0)


class _Job:
    """A real owner; who is told what ends up in `told`."""

    def __init__(self, store: MemoryJobStore | None = None) -> None:
        self.told: asyncio.Queue[tuple[AgentId, object]] = asyncio.Queue()
        self.owner = JobOwner(store or MemoryJobStore(), lambda who, word: self.told.put_nowait((who, word)))

    async def __aenter__(self) -> _Job:
        self._task = asyncio.get_running_loop().create_task(self.owner.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def expect(self, kind: type, who: AgentId) -> object:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                whom, word = await self.told.get()
                if isinstance(word, kind) and whom == who:
                    return word

    async def running(self, *nodes: str) -> None:
        await self.sealed(*nodes)
        self.owner.post(StoreOpened(agent(nodes[0]), 1, StoreAddress("a", 1)))
        await self.expect(StoreAt, agent(nodes[-1]))

    async def sealed(self, *nodes: str) -> None:
        for node in nodes:
            self.owner.post(joined(node, len(nodes), LEASE_S))
        async with asyncio.timeout(DEADLINE_S):
            while self.owner.state.phase is not Phase.SEALED:
                await self.told.get()


def test_who_falls_silent_is_lost_and_who_is_heard_is_not() -> None:
    async def story() -> None:
        async with _Job() as job:
            await job.sealed("a", "b")
            beating = asyncio.get_running_loop().create_task(_beat(job, "a"))
            word = await job.expect(Stop, agent("a"))
            beating.cancel()
            assert isinstance(word, Stop)
            assert "b was lost" in word.decision.reason
            assert "a" in job.owner.state.members

    asyncio.run(story())


def test_a_silent_agent_is_not_lost_while_its_ranks_train_with_others_but_soon_after_they_stop() -> None:
    async def story() -> None:
        async with _Job() as job:
            await job.running("a", "b")
            training = asyncio.get_running_loop().create_task(_beat(job, "a", progress=True))
            await asyncio.sleep(4 * LEASE_S)
            assert sorted(job.owner.state.members) == ["a", "b"]
            training.cancel()
            waiting = asyncio.get_running_loop().create_task(_beat(job, "a"))
            word = await job.expect(Stop, agent("a"))
            waiting.cancel()
            assert isinstance(word, Stop)
            assert "b was lost" in word.decision.reason

    asyncio.run(story())


async def _beat(job: _Job, node: str, *, progress: bool = False) -> None:
    while True:
        job.owner.note_contact(agent(node), progress)
        await asyncio.sleep(LEASE_S / 10)


def test_who_is_no_member_is_told_at_once() -> None:
    async def story() -> None:
        async with _Job() as job:
            await job.sealed("a")
            job.owner.note_contact(agent("x"))
            word = await job.expect(Refused, agent("x"))
            assert isinstance(word, Refused)
            assert word.retryable

    asyncio.run(story())


def test_a_member_of_a_job_that_is_over_is_told_so() -> None:
    async def story() -> None:
        async with _Job() as job:
            await job.sealed("a")
            job.owner.post(JobAborted("enough"))
            await job.expect(Stop, agent("a"))
            job.owner.post(AgentStopped(agent("a"), 1))
            await job.expect(Ended, agent("a"))
            job.owner.note_contact(agent("a"))
            await job.expect(Ended, agent("a"))

    asyncio.run(story())


@pytest.mark.parametrize("held_up_s", [2 * LEASE_S, 3 * LEASE_S])
def test_a_service_that_was_held_up_reads_before_it_judges(held_up_s: float) -> None:
    """While the process stood still all the leases ran out; what the agents said meanwhile waits to be read."""

    async def story() -> None:
        async with _Job() as job:
            await job.sealed("a", "b")
            time.sleep(held_up_s)  # noqa: ASYNC251  # that is the hold-up
            beating = [asyncio.get_running_loop().create_task(_late(job, node)) for node in ("a", "b")]
            await _both_stay(job, beating)

    asyncio.run(story())


async def _late(job: _Job, node: str) -> None:
    """Takes some turns of the loop, as reading a stream does."""
    for _ in range(5):
        await asyncio.sleep(0)
    await _beat(job, node)


async def _both_stay(job: _Job, beating: list[asyncio.Task[None]]) -> None:
    await asyncio.sleep(2 * LEASE_S)
    for task in beating:
        task.cancel()
    assert sorted(job.owner.state.members) == ["a", "b"]
    assert job.owner.state.phase is Phase.SEALED


class _Stuck(MemoryJobStore):
    """The write that seals the world waits, as for a disk that is full."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.free = asyncio.Event(), asyncio.Event()

    async def save(self, state: JobState, expected_version: int) -> int:
        if state.phase is Phase.SEALED:
            self.begun.set()
            await self.free.wait()
        return await super().save(state, expected_version)


@pytest.mark.parametrize("heard_before", [True, False], ids=["heard-before", "heard-after"])
def test_a_store_that_could_not_be_written_costs_nobody_its_lease(heard_before: bool) -> None:
    """The deadline of a's lease falls due during the write of b's joining; b is heard after that."""

    async def story() -> None:
        store = _Stuck()
        async with _Job(store) as job:
            loop = asyncio.get_running_loop()
            job.owner.post(joined("a", 2, LEASE_S))
            await job.expect(Waiting, agent("a"))
            beating = [loop.create_task(_beat(job, "a"))]
            job.owner.post(joined("b", 2, LEASE_S))
            async with asyncio.timeout(DEADLINE_S):
                await store.begun.wait()
            await asyncio.sleep(2 * LEASE_S)
            if heard_before:
                job.owner.note_contact(agent("b"))
            store.free.set()
            await job.expect(Assigned, agent("b"))
            beating.append(loop.create_task(_beat(job, "b")))
            await _both_stay(job, beating)

    asyncio.run(story())
