"""An agent whose stream ends: how soon it counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from served import soon

from rendezvous.metrics import Metrics
from rendezvous.service.agent_stream import AgentStream, Limits
from rendezvous.service.jobs import Job
from rendezvous.session_replay import Redirect
from rendezvous.store.open import open_store
from rendezvous.values.events import AgentJoined
from rendezvous.values.types import AgentId, JobSpec, NodeFacts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_AGENT = AgentId("node", "1")


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # what the owner has done is seen in the state only
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def attached(resume_grace_s: float) -> AsyncIterator[tuple[Job, AgentStream]]:
    """A job with one agent."""
    store = await open_store("memory")
    job = Job("job", store.job("job"), lambda _: True, Metrics(), resume_grace_s)
    await job.wait_loaded()
    owner = job.owner
    stream = AgentStream(_AGENT, None, Limits(), owner.note_contact, owner.post, lambda: False)
    job.attach(stream)
    owner.post(AgentJoined(_AGENT, JobSpec("job", 1, 2), NodeFacts("node", "127.0.0.1", 1)))
    await until(lambda: len(job.state.members))
    yield job, stream
    await job.close(Redirect("", 0.0, "the test is over"))
    await store.close()


@pytest.mark.parametrize("redirected", [False, True])
def test_a_stream_that_the_service_has_ended_is_not_a_broken_one(redirected: bool) -> None:
    """It may have redirected thousands of agents at once, which cannot all come back within the grace."""

    async def story() -> None:
        async with attached(resume_grace_s=0.0) as (job, stream):
            if redirected:
                stream.redirect(Redirect("", 0.2, "this replica cannot confirm that it owns the job"))
            job.detach(stream)
            if not redirected:
                await until(lambda: not len(job.state.members))
            for _ in range(100):  # turns of the loop: the grace would be over in the next one
                await asyncio.sleep(0)
            assert list(job.state.members) == (["node"] if redirected else [])

    soon(story())
