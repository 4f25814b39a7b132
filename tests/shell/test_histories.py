"""What clients are told, checked as histories, while replicas are killed, paused and partitioned, and etcd hangs.

A value is a register whose writes and reads return its version. So a history is linearizable exactly if the order of
the versions agrees with the order in time, and each version has one content. A decision of a job is sent to all its
agents: each generation has one, an agent receives them in this order, and all of them are in the outcome.

`DDP_HISTORIES` (default 1) histories are played, each with its seed. The nightly run has 10,000 operations in each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from etcd_cluster import needs_etcd, running
from ports import free_ports
from served import Agent, Cable, Service, agents

from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.events import (
    AgentStopped,
    Assigned,
    Ended,
    RankFailed,
    RanksFinished,
    Stop,
    StoreAt,
    StoreOpened,
)
from rendezvous.values.types import Cause, FailureClass, JobSpec, RestartBudget, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from etcd_cluster import EtcdCluster, Member

HISTORIES = int(os.environ.get("DDP_HISTORIES", "1"))
_CLIENTS, _KEYS, _CALL_S = 8, 4, 8.0
_KINDS = ("put", "compare", "get", "get")
_HARMS = ("kill", "pause", "partition", "hang a member", "hang the leader")
_JOB = JobSpec("job", 3, 3, "train.py", budget=RestartBudget(10**6), node_failure_limit=10**6, lease_s=60.0)


# --- the checker --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """`version` 0 of a read: there is no value. `outcome`: done, refused, or unknown."""

    kind: str  # put, compare, get
    key: str
    value: str
    begin: float
    end: float = float("inf")
    version: int = 0
    outcome: str = "done"
    expected: int = 0

    @property
    def is_write(self) -> bool:
        return self.kind != "get"


def problems(history: Iterable[Operation]) -> list[str]:
    by_key: dict[str, list[Operation]] = {}
    for each in history:
        by_key.setdefault(each.key, []).append(each)
    return [
        f"{key}: {words}" for key, found in by_key.items() for words in (*_contents(found), *_order(found))
    ]


def _contents(found: Sequence[Operation]) -> Iterable[str]:
    at, where = dict[int, str](), dict[str, int]()
    refused = {each.value for each in found if each.outcome == "refused"}
    written = {each.value for each in found if each.is_write} - refused
    for each in found:
        if each.outcome != "done" or not each.version:
            continue
        if each.value not in written:
            yield f"{each.value} was read, and {'refused' if each.value in refused else 'never written'}"
        if at.setdefault(each.version, each.value) != each.value:
            yield f"version {each.version} is {at[each.version]} and {each.value}"
        if where.setdefault(each.value, each.version) != each.version:
            yield f"{each.value} took effect at {where[each.value]} and at {each.version}"
    for each in found:
        if each.kind == "compare" and each.outcome == "done":
            if between := [version for version in at if each.expected < version < each.version]:
                yield f"{each.value} replaced {each.expected}, although {between} followed it"


def _order(found: Sequence[Operation]) -> Iterable[str]:
    """A write without an answer took effect if its value was read, after it began."""
    done = [each for each in found if each.outcome == "done"]
    versions = {each.value: each.version for each in done if each.version}
    read = [each for each in found if each.outcome == "unknown" and each.is_write and each.value in versions]
    known = [*done, *(replace(each, version=versions[each.value]) for each in read)]
    ended, newest, number = sorted(done, key=lambda each: each.end), 0, 0
    for each in sorted(known, key=lambda each: each.begin):
        while number < len(ended) and ended[number].end < each.begin:
            newest, number = max(newest, ended[number].version), number + 1
        if each.version < newest + each.is_write:
            yield f"{each.kind} of {each.value or 'nothing'} at {each.version} began after {newest} was known"


Told = list[tuple[int, str]]


def problems_of_decisions(told: Sequence[Told], outcome: Told) -> list[str]:
    """`told`: what each agent was told, in this order; `outcome`: the last decisions of the job."""
    agreed, found = dict(outcome), []
    since = min(agreed, default=0)
    if [generation for generation, _ in outcome] != list(range(since, since + len(outcome))):
        found.append(f"the decisions of the outcome are not one of each generation: {outcome}")
    for number, each in enumerate(told):
        generations = [generation for generation, _ in each]
        if generations != sorted(generations):
            found.append(f"agent {number} was told older decisions after newer ones: {generations}")
        for at, words in each:
            other = agreed.get(at) if at >= since else agreed.setdefault(at, words)
            if other != words:
                found.append(f"agent {number} was told {words!r} of {at}, not {other!r}")
    return found


def test_the_checker_finds_what_must_not_be() -> None:
    put = Operation("put", "k", "a", 1.0, 2.0, 5)
    read = Operation("get", "k", "a", 3.0, 4.0, 5)
    open_put = Operation("put", "k", "b", 1.0, outcome="unknown")
    late = Operation("get", "k", "b", 5.0, 6.0, 7)
    assert problems([put, read, open_put, late]) == []
    assert problems([put, Operation("get", "k", "", 0.5, 1.5, 0)]) == []  # at the same time
    for wrong in (
        [put, Operation("get", "k", "", 3.0, 4.0, 0)],  # lost
        [put, open_put, late, Operation("get", "k", "a", 7.0, 8.0, 5)],  # an older value after a newer one
        [put, Operation("put", "k", "c", 3.0, 4.0, 5)],  # two contents
        [put, Operation("put", "k", "c", 3.0, 4.0, 4)],  # written below what was known
        [put, open_put, late, Operation("get", "k", "b", 7.0, 8.0, 9)],  # took effect twice
        [put, late, Operation("put", "k", "b", 7.0, outcome="unknown")],  # was read before it began
        [put, Operation("get", "k", "z", 3.0, 4.0, 6)],  # from nowhere
        [
            put,
            Operation("compare", "k", "c", 3.0, outcome="refused"),
            Operation("get", "k", "c", 5.0, 6.0, 8),
        ],
        [put, open_put, late, Operation("compare", "k", "c", 1.0, 9.0, 8, expected=5)],
    ):
        assert problems(wrong)


def test_the_checker_of_decisions_finds_what_must_not_be() -> None:
    told = [(1, "x"), (2, "y")]
    assert problems_of_decisions([told, [*told, (2, "y")], told[1:]], told) == []
    for wrong in ([(2, "y"), (1, "x")], [(1, "z")], [(3, "x")]):
        assert len(problems_of_decisions([told, wrong], told)) == 1
    assert problems_of_decisions([told], [*told, (2, "z")])


# --- histories ----------------------------------------------------------------------------------------


@dataclass
class Player:
    """The clients of values and the agents of a job. `left` and `harms`: operations and harms to be done."""

    endpoints: list[str]
    chance: random.Random
    left: int
    harms: int
    clients: int = _CLIENTS
    history: list[Operation] = field(default_factory=list)
    told: dict[str, Told] = field(default_factory=dict)
    outcome: Told = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.left <= 0 and self.harms <= 0 and any(self.told.values())

    async def be_client(self, name: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(each, options=[("grpc.use_local_subchannel_pool", 1)])
                )
                for each in self.endpoints
            ]
            known: dict[str, int] = {}
            while not self.is_over:
                key, kind = f"k{self.chance.randrange(_KEYS)}", self.chance.choice(_KINDS)
                value = f"{name}-{len(self.history)}"
                done = await self._do(self.chance.choice(channels), kind, key, value, known.get(key, 0))
                self.history.append(done)
                self.left -= done.outcome != "unknown"
                if done.version:
                    known[key] = done.version
        self.clients -= 1

    async def _do(self, channel: Any, kind: str, key: str, value: str, expected: int) -> Operation:
        request: Any = pb.GetValueRequest(job_id=_JOB.job_id, key=key)
        if kind != "get":
            request = pb.PutValueRequest(job_id=_JOB.job_id, key=key, value=value.encode())
        if kind == "compare":
            request.expected_version = expected
        name, begin = ("GetValue" if kind == "get" else "PutValue"), time.monotonic()
        try:
            data = await channel.unary_unary(f"/rendezvous.v1.Scratchpad/{name}")(
                request.SerializeToString(), timeout=_CALL_S
            )
        except grpc.aio.AioRpcError as error:
            code, end = error.code(), time.monotonic()
            if kind == "get" and code is grpc.StatusCode.NOT_FOUND and key in str(error.details()):
                return Operation(kind, key, "", begin, end)
            refused = kind == "compare" and code is grpc.StatusCode.FAILED_PRECONDITION
            await asyncio.sleep(0.02)
            return Operation(kind, key, value, begin, outcome="refused" if refused else "unknown")
        answer = getattr(pb, f"{name}Response").FromString(data)
        return Operation(
            kind,
            key,
            answer.value.decode() if kind == "get" else value,
            begin,
            time.monotonic(),
            answer.version,
            expected=expected,
        )

    async def be_agent(self, agent: Agent, everyone: Sequence[Agent]) -> None:
        """Fail as soon as the ranks may run, in turn; whose turn it is in the end finishes the job for all."""
        told, generation, rank = self.told.setdefault(agent.id.node, []), 0, 0
        while True:
            match await agent.session.receive():
                case Assigned(assignment):
                    generation, rank = assignment.generation, assignment.node_rank
                    if rank == 0:
                        agent.session.send(StoreOpened(agent.id, generation, StoreAddress("127.0.0.1", 1)))
                case StoreAt(at) if at == generation and rank == generation % 3 and self.is_over:
                    while self.clients:  # noqa: ASYNC110  # the values end with the job
                        await asyncio.sleep(0.05)
                    for each in everyone:
                        each.session.send(RanksFinished(each.id, generation))
                case StoreAt(at) if at == generation and rank == generation % 3:
                    words = f"error {generation}"
                    cause = Cause(agent.id.node, rank, 0, FailureClass.USER_EXCEPTION, words, 1, ran_s=60.0)
                    agent.session.send(RankFailed(agent.id, generation, cause))
                case Stop(at, decision):
                    told.append((at, f"{decision.kind}: {decision.reason}"))
                    agent.session.send(AgentStopped(agent.id, at))
                case Ended(outcome):
                    self.outcome = [
                        (each.generation, f"{each.kind}: {each.reason}") for each in outcome.decisions
                    ]
                    return


class Replicas:
    """Three, each with connections of its own to the members of etcd."""

    def __init__(self, cables: Sequence[Sequence[Cable]], urls: Sequence[str]) -> None:
        self._cables, self._urls = cables, urls
        self.endpoints = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.all = [self._start(number) for number in range(3)]

    def _start(self, number: int) -> Service:
        return Service("--listen", self.endpoints[number], "--store", self._urls[number])

    def kill(self, number: int) -> None:
        self.all[number].close()
        self.all[number] = self._start(number)

    @contextlib.contextmanager
    def paused(self, number: int) -> Iterator[None]:
        os.kill(self.all[number].pid, signal.SIGSTOP)
        yield
        os.kill(self.all[number].pid, signal.SIGCONT)

    @contextlib.contextmanager
    def partitioned(self, number: int) -> Iterator[None]:
        """It cannot reach etcd, and clients can reach it."""
        for cable in self._cables[number]:
            cable.freeze()
        yield
        for cable in self._cables[number]:
            cable.thaw()

    def close(self) -> None:
        for each in self.all:
            each.close()


@contextlib.contextmanager
def hung(member: Member) -> Iterator[None]:
    member.hang()
    yield
    member.go_on()


async def harm(cluster: EtcdCluster, replicas: Replicas, player: Player) -> None:
    """One harm after another, and each is over before the next."""
    chance = player.chance
    while not player.is_over:
        await asyncio.sleep(chance.uniform(0.2, 1.5))
        number = chance.randrange(3)
        match _HARMS[player.harms % len(_HARMS)]:
            case "kill":
                await asyncio.to_thread(replicas.kill, number)
                while_it_lasts: Any = contextlib.nullcontext()
            case "pause":
                while_it_lasts = replicas.paused(number)
            case "partition":
                while_it_lasts = replicas.partitioned(number)
            case "hang a member":
                while_it_lasts = hung(chance.choice(cluster.members))
            case _:
                while_it_lasts = hung(await asyncio.to_thread(cluster.leader))
        with while_it_lasts:
            await asyncio.sleep(chance.uniform(0.2, 6.0))
        player.harms -= 1


async def play(cluster: EtcdCluster, seed: int, operations: int, harms: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cables = [[Cable(host) for host in cluster.hosts.split(",")] for _ in range(3)]
        urls = []
        for each in cables:
            hosts = [await stack.enter_async_context(cable) for cable in each]
            urls.append(f"etcd://{','.join(hosts)}/history-{seed}")
        replicas = await asyncio.to_thread(Replicas, cables, urls)
        stack.callback(replicas.close)
        await asyncio.gather(*(asyncio.to_thread(each.await_endpoint) for each in replicas.all))
        player = Player(replicas.endpoints, random.Random(seed), operations, harms)
        nodes = await stack.enter_async_context(agents(replicas.endpoints, _JOB, ["a", "b", "c"]))
        async with asyncio.timeout(3600.0), asyncio.TaskGroup() as group:
            for agent in nodes:
                group.create_task(player.be_agent(agent, nodes))
            for name in range(_CLIENTS):
                group.create_task(player.be_client(name))
            group.create_task(harm(cluster, replicas, player))
    done = sum(each.outcome == "done" for each in player.history)
    told = [*player.told.values()]
    print(
        f"seed {seed}: {len(player.history)} operations, {done} done, {harms - player.harms} harms,", end=" "
    )
    print(f"{len(player.outcome)} decisions")
    assert problems(player.history) == []
    assert problems_of_decisions(told, player.outcome) == []
    assert player.outcome


@needs_etcd
@pytest.mark.parametrize(
    ("operations", "harms"),
    [(200, 3), pytest.param(10_000, 30, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
)
def test_what_clients_are_told_is_linearizable(tmp_path: Path, operations: int, harms: int) -> None:
    with running(tmp_path) as cluster:
        for seed in range(HISTORIES):
            asyncio.run(play(cluster, seed, operations, harms))
