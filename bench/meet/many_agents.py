"""Many agents in one process, each with a real client session of its own, connection included.

    python bench/meet/many_agents.py HOST:PORT JOB FIRST COUNT ALL

These are COUNT agents from number FIRST on, of ALL that the job has. Says when it is ready. On the word "meet" all of
them set off, and it answers with the instants at which the last had its assignment, and at which the last knew where
the store is. Node rank 0 opens none: it only says that it has.
Then they stay, with one heartbeat per second each, until the input ends; then they say goodbye.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import resource
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from rendezvous.client.options import ClientOptions
from rendezvous.client.session import connect
from rendezvous.grpc_io import choose_engine
from rendezvous.values.events import (
    AgentJoined,
    Assigned,
    Ended,
    RanksFinished,
    Refused,
    StoreAt,
    StoreOpened,
)
from rendezvous.values.types import AgentId, JobSpec, NodeFacts, StoreAddress

if TYPE_CHECKING:
    from rendezvous.client.session import Session


class Agent:
    def __init__(self, session: Session, agent: AgentId, spec: JobSpec) -> None:
        self.session, self._agent, self._spec = session, agent, spec
        self.generation = 0
        self.assigned_at = self.ready_at = 0.0

    async def meet(self) -> None:
        facts = NodeFacts(host=self._agent.node, address="127.0.0.1", nproc=8)
        self.session.send(AgentJoined(self._agent, self._spec, facts))
        while not self.ready_at:
            match await self.session.receive():
                case Assigned(assignment):
                    self.assigned_at = time.monotonic()
                    self.generation = assignment.generation
                    if assignment.node_rank == 0:
                        opened = StoreAddress("127.0.0.1", 1)
                        self.session.send(StoreOpened(self._agent, self.generation, opened))
                case StoreAt():
                    self.ready_at = time.monotonic()
                case Refused(reason) | Ended(reason):
                    _give_up(f"{self._agent}: {reason}")

    async def part(self) -> None:
        self.session.send(RanksFinished(self._agent, self.generation))
        while not isinstance(await self.session.receive(), Ended):
            pass
        await self.session.close()


async def main() -> None:
    endpoint, job = sys.argv[1:3]
    first, count, whole = (int(word) for word in sys.argv[3:])
    spec = JobSpec(job, whole, whole, join_timeout_s=120.0)
    lines = await _input()
    _answer({})
    await lines.readline()
    agents = []
    for number in range(first, first + count):
        agent = AgentId(f"node{number}", job)
        agents.append(Agent(connect([endpoint], agent, ClientOptions()), agent, spec))
    await asyncio.gather(*(agent.meet() for agent in agents))
    _answer(
        {
            "assigned": max(agent.assigned_at for agent in agents),
            "ready": max(agent.ready_at for agent in agents),
        }
    )
    await lines.read()
    await asyncio.gather(*(agent.part() for agent in agents))


def _give_up(words: str) -> NoReturn:
    """At once: thousands of other sessions have nothing to add."""
    print(words, file=sys.stderr, flush=True)
    os._exit(1)


async def _input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _answer(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    choose_engine()
    importlib.import_module("rendezvous.client.remote_session")  # and gRPC with it, before the clock starts
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as in the service: all these sessions are no garbage
    asyncio.run(main())
