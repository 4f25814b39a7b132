"""Many agents in one process, each with a real client session of its own, connection included.

    python bench/meet/many_agents.py HOST:PORT[,HOST:PORT...] JOB FIRST COUNT ALL [questions]

These are COUNT agents from number FIRST on, of ALL that the job has. Says when it is ready. On the word "meet" all of
them set off, and it answers with the instants at which the last had its assignment, and at which the last knew where
the store is. Node rank 0 opens none: it only says that it has. With "questions" they can be asked about their ranks, as
agents of ddp-launch can, for which each of them opens a second stream.
Then they stay, with one heartbeat per second each, until the input ends; then they say goodbye.

Meanwhile they obey orders, one line of JSON each, and answer each when all of them have carried it out:

    {"fail": GENERATION, "rank": NODE_RANK}   a rank of that node fails; all stop, and run in the next generation
    {"part": true}                            all ranks have finished; the answer has the decisions of the outcome
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
from typing import TYPE_CHECKING, Any, NoReturn

from rendezvous.client.credential_files import ClientOptions
from rendezvous.client.session import connect
from rendezvous.grpc_io import choose_engine
from rendezvous.values.events import (
    AgentJoined,
    AgentStopped,
    Assigned,
    Ended,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
)
from rendezvous.values.questions import CannotAnswer
from rendezvous.values.types import (
    UNLIMITED,
    AgentId,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    RestartBudget,
    StoreAddress,
)

if TYPE_CHECKING:
    from rendezvous.client.session import Session
    from rendezvous.values.events import ToAgent
    from rendezvous.values.questions import Told, Wanted
    from rendezvous.values.types import Outcome


class Agent:
    """Does what the agent of a launcher does, and runs no ranks."""

    def __init__(self, session: Session, agent: AgentId, spec: JobSpec) -> None:
        self.session, self._agent, self._spec = session, agent, spec
        self.generation = self.running = 0  # assigned; with a store, so that its ranks may run
        self.node_rank = -1
        self.assigned_at = self.ready_at = self.contact_at = 0.0
        self.decisions: dict[int, list[str]] = {}  # by generation, as it was told to stop
        self.outcome: Outcome | None = None
        session.watch_contact(self._note_contact)

    async def answer(self, _wanted: Wanted) -> Told:
        return CannotAnswer("this agent runs no ranks")

    def _note_contact(self, held: bool) -> None:
        if held:
            self.contact_at = time.monotonic()

    async def meet(self) -> None:
        self._join()
        await self.run(1)

    def _join(self) -> None:
        facts = NodeFacts(host=self._agent.node, address="127.0.0.1", nproc=8)
        self.session.send(AgentJoined(self._agent, self._spec, facts))

    async def run(self, generation: int) -> None:
        """Until its ranks may run in this generation, or a later one."""
        while self.running < generation:
            self._take(await self.session.receive())

    def _take(self, message: ToAgent) -> None:
        now = time.monotonic()
        match message:
            case Assigned(assignment) if assignment.generation > self.generation:
                self.assigned_at = now
                self.generation, self.node_rank = assignment.generation, assignment.node_rank
                if assignment.node_rank == 0:
                    opened = StoreAddress("127.0.0.1", 1)
                    self.session.send(StoreOpened(self._agent, self.generation, opened))
            case StoreAt(generation) if self.running < generation == self.generation:
                self.running, self.ready_at = generation, now
            case Stop(generation, decision):
                if generation not in self.decisions:
                    self.session.send(AgentStopped(self._agent, generation))
                known = self.decisions.setdefault(generation, [])
                if (words := f"{decision.kind}: {decision.reason}") not in known:
                    known.append(words)
            case Ended(outcome):
                self.outcome = outcome
            case Refused(retryable=True):
                self._join()
            case Refused(reason):
                _give_up(f"{self._agent}: {reason}")

    def fail(self, generation: int) -> None:
        """One of its ranks raises an error, long after its start."""
        words = f"error of generation {generation}"
        first = Cause(
            self._agent.node, 8 * self.node_rank, 0, FailureClass.USER_EXCEPTION, words, 1, ran_s=60.0
        )
        self.session.send(RankFailed(self._agent, generation, first))

    async def part(self) -> None:
        if self.outcome is None:
            self.session.send(RanksFinished(self._agent, self.generation))
        while self.outcome is None:
            self._take(await self.session.receive())
        await self.session.close()


async def main() -> None:
    endpoints, job = sys.argv[1].split(","), sys.argv[2]
    first, count, whole = (int(word) for word in sys.argv[3:6])
    spec = JobSpec(job, whole, whole, join_timeout_s=300.0, budget=RestartBudget(UNLIMITED))
    lines = await _input()
    _answer({})
    await lines.readline()
    agents = []
    for number in range(first, first + count):
        agent = AgentId(f"node{number}", job)
        agents.append(Agent(connect(endpoints, agent, ClientOptions()), agent, spec))
        if "questions" in sys.argv[6:]:
            agents[-1].session.answer_with(agents[-1].answer)
    await asyncio.gather(*(agent.meet() for agent in agents))
    _answer(
        {
            "assigned": max(agent.assigned_at for agent in agents),
            "ready": max(agent.ready_at for agent in agents),
        }
    )
    while order := await lines.readline():
        _answer(await _carry_out(json.loads(order), agents))
    await asyncio.gather(*(agent.part() for agent in agents))


async def _carry_out(order: dict[str, int], agents: list[Agent]) -> dict[str, Any]:
    if "part" in order:
        await asyncio.gather(*(agent.part() for agent in agents))
        outcomes = {str(_decisions(agent.outcome)): _decisions(agent.outcome) for agent in agents}
        return {"outcomes": list(outcomes.values())}
    generation = order["fail"]
    for agent in agents:
        if agent.node_rank == order["rank"]:
            agent.fail(generation)
    await asyncio.gather(*(agent.run(generation + 1) for agent in agents))
    told = [agent.decisions.get(generation, []) for agent in agents]
    return {
        "contact": max(agent.contact_at for agent in agents),
        "ready": max(agent.ready_at for agent in agents),
        "untold": sum(1 for words in told if not words),
        "decisions": sorted({each for words in told for each in words}),
        "generations": sorted({agent.running for agent in agents}),
    }


def _decisions(outcome: Outcome | None) -> list[tuple[int, str, str]]:
    assert outcome is not None
    return [(each.generation, str(each.kind), each.reason) for each in outcome.decisions]


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


def _answer(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    choose_engine()
    importlib.import_module("rendezvous.client.remote_session")  # and gRPC with it, before the clock starts
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as in the service: all these sessions are no garbage
    asyncio.run(main())
