"""An agent whose stream ends, or that falls silent: how soon it counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from served import soon

from rendezvous.metrics import Metrics
from rendezvous.service.agent_stream import AgentStream, ServiceLimits
from rendezvous.service.jobs import Job
from rendezvous.session_replay import Redirect
from rendezvous.store.open import open_store
from rendezvous.values.events import AgentJoined, RankFailed, StoreOpened
from rendezvous.values.job_state import Phase
from rendezvous.values.types import AgentId, Cause, FailureClass, JobSpec, NodeFacts, StoreAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_CLOSED = Cause("a", 0, 0, FailureClass.CONSEQUENCE, "connection closed by peer", 1)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # what the owner has done is seen in the state only
        await asyncio.sleep(0)


class Served:
    """A job of some nodes in the service. Its clock stands still: the test says what time it is."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.streams: dict[str, AgentStream] = {}

    async def join(self, *nodes: str) -> None:
        spec = JobSpec("job", len(nodes), 2)
        for node in nodes:
            owner, agent = self.job.owner, AgentId(node, "1")
            stream = AgentStream(agent, None, ServiceLimits(), owner.note_contact, owner.post, lambda: False)
            self.streams[node] = stream
            self.job.attach(stream)
            owner.post(AgentJoined(agent, spec, NodeFacts(node, "127.0.0.1", 1)))
        await until(lambda: len(self.job.state.members) == len(nodes))

    async def run(self, *nodes: str) -> None:
        await self.join(*nodes)
        await until(lambda: self.job.state.phase is Phase.SEALED)
        self.job.owner.post(StoreOpened(AgentId(nodes[0], "1"), 1, StoreAddress("127.0.0.1", 1)))
        await until(lambda: self.job.state.phase is Phase.RUNNING)

    def heartbeat(self, node: str, at: float, *, progress: bool = False) -> None:
        with pytest.MonkeyPatch.context() as clock:
            clock.setattr(asyncio.get_running_loop(), "time", lambda: at)
            self.job.owner.note_contact(AgentId(node, "1"), progress)

    def breaks(self, node: str, at: float) -> None:
        with pytest.MonkeyPatch.context() as clock:
            clock.setattr(asyncio.get_running_loop(), "time", lambda: at)
            self.job.detach(self.streams[node])

    async def lost_at(self, at: float) -> list[str]:
        """The nodes that are lost once the job has looked at this time."""
        self.job.lose_silent_agents(at)
        await until(lambda: not self.job.owner.backlog)
        for _ in range(10):  # turns of the loop, in which the owner processes its last event
            await asyncio.sleep(0)
        return [node for node in self.streams if node not in self.job.state.members]


@contextlib.asynccontextmanager
async def served(resume_grace_s: float = 1.0) -> AsyncIterator[Served]:
    store = await open_store("memory")
    job = Job("job", store.job("job"), lambda _: True, Metrics(), resume_grace_s)
    await job.wait_loaded()
    yield Served(job)
    await job.close(Redirect("", 0.0, "the test is over"))
    await store.close()


@pytest.mark.parametrize("redirected", [False, True])
def test_a_stream_that_the_service_has_ended_is_not_a_broken_one(redirected: bool) -> None:
    """It may have redirected thousands of agents at once, which cannot all come back within the grace."""

    async def story() -> None:
        async with served() as job:
            await job.join("a")
            if redirected:
                job.streams["a"].redirect(
                    Redirect("", 0.2, "this replica cannot confirm that it owns the job")
                )
            now = asyncio.get_running_loop().time()
            job.breaks("a", now)
            assert not await job.lost_at(now + 0.9)
            assert await job.lost_at(now + 1.0) == ([] if redirected else ["a"])

    soon(story())


# --- ranks that run


def trained_for_20_s(job: Served, *nodes: str, step_s: float = 1.0) -> float:
    """Each agent sends a heartbeat per second. Returns the time of the last one, which reported progress."""
    began_at = asyncio.get_running_loop().time()
    for second in range(21):
        for node in nodes:
            job.heartbeat(node, began_at + second, progress=second % step_s == 0)
    return began_at + 20.0


def test_a_broken_stream_alone_says_nothing_about_ranks_that_run() -> None:
    """Their steps may take long, and no other agent is connected that could report one."""

    async def story() -> None:
        async with served() as job:
            await job.run("a")
            now = asyncio.get_running_loop().time()
            job.breaks("a", now)
            assert not await job.lost_at(now + 14.0)

    soon(story())


def test_a_stream_that_breaks_while_steps_of_20_s_run_costs_nothing() -> None:
    async def story() -> None:
        async with served() as job:
            await job.run("a", "b")
            now = trained_for_20_s(job, "a", "b", step_s=20.0)
            job.breaks("b", now)
            for second in range(1, 15):
                job.heartbeat("a", now + second)
                assert not await job.lost_at(now + second)

    soon(story())


def test_a_stream_that_breaks_when_the_ranks_stop_is_a_lost_node_soon_after_the_others_report_it() -> None:
    async def story() -> None:
        async with served() as job:
            await job.run("a", "b")
            now = trained_for_20_s(job, "a", "b")
            job.breaks("b", now)
            assert not await job.lost_at(now + 9.0), "no other agent has said that the ranks have stopped"
            job.heartbeat("a", now + 1.0)
            assert not await job.lost_at(now + 1.0)
            job.heartbeat("a", now + 2.0)
            assert await job.lost_at(now + 2.0) == ["b"]

    soon(story())


def test_streams_that_all_break_at_once_are_no_lost_nodes() -> None:
    """A load balancer in front of the service restarts."""

    async def story() -> None:
        async with served() as job:
            await job.run("a", "b")
            now = trained_for_20_s(job, "a", "b")
            for node in ("a", "b"):
                job.breaks(node, now)
            assert not await job.lost_at(now + 14.0)

    soon(story())


@pytest.mark.parametrize(("step_s", "lost"), [(1.0, ["b"]), (20.0, [])])
def test_a_silent_node_is_lost_early_only_if_regular_steps_stopped_with_it(
    step_s: float, lost: list[str]
) -> None:
    async def story() -> None:
        async with served() as job:
            await job.run("a", "b")
            now = trained_for_20_s(job, "a", "b", step_s=step_s)
            for second in range(1, 4):
                job.heartbeat("a", now + second)
                assert not await job.lost_at(now + second)
            job.heartbeat("a", now + 4.0)
            assert await job.lost_at(now + 4.0) == lost

    soon(story())


def test_ranks_that_fail_are_evidence_too() -> None:
    """They see closed connections of their peers. When they stop, a broken stream is a lost node after the grace."""

    async def story() -> None:
        async with served() as job:
            await job.run("a", "b")
            now = asyncio.get_running_loop().time()
            job.breaks("b", now)
            assert not await job.lost_at(now + 2.0)
            job.job.owner.post(RankFailed(AgentId("a", "1"), 1, _CLOSED))
            await until(lambda: job.job.state.phase is Phase.STOPPING)
            assert await job.lost_at(now + 2.0) == ["b"]

    soon(story())
