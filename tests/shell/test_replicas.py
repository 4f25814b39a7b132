"""What breaks around a job that runs: its replica dies, hangs, loses etcd; its only service dies and comes back.

Each failure that is reported meanwhile is decided once, by whichever replica is left, and soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from etcd_cluster import free_ports, needs_etcd, running
from launched import eventually
from served import Agent, Service, agents, serving, soon

from rendezvous.events import (
    AgentStopped,
    Assigned,
    Ended,
    RankFailed,
    RanksFinished,
    Stop,
    StoreAt,
    StoreOpened,
)
from rendezvous.store.open import open_store
from rendezvous.types import Cause, Decision, DecisionKind, FailureClass, JobSpec, RestartBudget, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from etcd_cluster import EtcdCluster
    from launched import Launch, Launched

_DECIDED_WITHIN_S = 6.0
_ETCD_LEADER_GONE_S = 9.0  # its successor lets every lease stand for an election and a time to live more
_JOB = JobSpec("job", 2, 2, "train.py", budget=RestartBudget(9), node_failure_limit=9)


# --- three replicas over three members of etcd ---------------------------------------------------------------


class Replicas:
    def __init__(self, cluster: EtcdCluster) -> None:
        self.endpoints = [f"127.0.0.1:{port}" for port in free_ports(3)]
        store = cluster.url("replicas")
        self.all = [
            Service("--listen", at, "--store", store, "--log-format", "json") for at in self.endpoints
        ]
        for replica in self.all:
            replica.await_endpoint()

    def who_said(self, kind: str, generation: int) -> list[Service]:
        """Once for each time it said so."""
        wanted = {"job": _JOB.job_id, "generation": generation, "kind": kind}
        said = ((replica, line) for replica in self.all for line in replica.log)
        lines = [(replica, json.loads(line)) for replica, line in said if line.startswith("{")]
        return [replica for replica, line in lines if wanted.items() <= line.items()]

    def owner_at(self, generation: int) -> Service:
        found: list[Service] = eventually(lambda: self.who_said("running", generation))
        assert len(found) == 1
        return found[0]

    def close(self) -> None:
        for replica in self.all:
            replica.close()


async def start(agent: Agent, generation: int) -> None:
    """Its ranks of that generation may run. Where an older one stands may be told again before."""
    while (assigned := await agent.expect(Assigned)).assignment.generation < generation:
        pass
    assert assigned.assignment.generation == generation
    if assigned.assignment.node_rank == 0:
        agent.session.send(StoreOpened(agent.id, generation, StoreAddress("127.0.0.1", 1234)))
    while (await agent.expect(StoreAt)).generation != generation:
        pass


async def told_to_stop(agent: Agent, generation: int) -> Decision:
    while (stop := await agent.expect(Stop)).generation != generation:
        pass
    return stop.decision


async def fail_and_restart(both: list[Agent], generation: int) -> float:
    """A rank of the one agent fails; both start the next generation. How long the decision took."""
    failed = both[generation % 2]
    assert failed.assignment is not None
    rank = failed.assignment.node_rank
    cause = Cause(failed.id.node, rank, 0, FailureClass.USER_EXCEPTION, f"error {generation}", 1, ran_s=60.0)
    at = time.monotonic()
    failed.session.send(RankFailed(failed.id, generation, cause))
    decisions = await asyncio.gather(*(told_to_stop(agent, generation) for agent in both))
    took = time.monotonic() - at
    assert decisions[0] == decisions[1]
    assert decisions[0].kind is DecisionKind.RESTART
    assert f"error {generation}" in decisions[0].reason
    for agent in both:
        agent.session.send(AgentStopped(agent.id, generation))
    await asyncio.gather(*(start(agent, generation + 1) for agent in both))
    return took


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("etcd")) as started:
        yield started


@needs_etcd
def test_a_replica_never_sends_anyone_to_itself(cluster: EtcdCluster) -> None:
    """The key of its former lease, or of the life before a crash, stays in etcd for a while."""

    async def story() -> None:
        before = await open_store(cluster.url("itself"), "127.0.0.1:1")
        after = await open_store(cluster.url("itself"), "127.0.0.1:1")
        other = await open_store(cluster.url("itself"), "127.0.0.1:2")
        try:
            assert (await before.ownership.claim("job")).is_me
            found = [await store.ownership.claim("job") for store in (after, other)]
            assert [(owner.is_me, owner.address) for owner in found] == [(False, ""), (False, "127.0.0.1:1")]
        finally:
            for store in (before, after, other):
                await store.close()

    soon(story())


@needs_etcd
def test_decisions_go_on_whatever_dies_and_none_is_taken_twice(cluster: EtcdCluster) -> None:
    async def decided_after(what: str, harm: Callable[[], Any], both: list[Agent], generation: int) -> None:
        await asyncio.to_thread(harm)
        took = await fail_and_restart(both, generation)
        print(f"decided {took:.2f} s after {what}")
        limit_s = _ETCD_LEADER_GONE_S if "leader" in what else _DECIDED_WITHIN_S
        assert took <= limit_s, f"{took:.2f} s after {what}"

    async def story(replicas: Replicas) -> None:
        async with agents(replicas.endpoints, _JOB, ["a", "b"]) as both:
            await asyncio.gather(*(start(agent, 1) for agent in both))
            first = await asyncio.to_thread(replicas.owner_at, 1)
            await decided_after("its owner was killed", partial(first.end, signal.SIGKILL), both, 1)
            second = await asyncio.to_thread(replicas.owner_at, 2)
            hang = partial(os.kill, second.pid, signal.SIGSTOP)
            await decided_after("its owner was cut off", hang, both, 2)
            third = await asyncio.to_thread(replicas.owner_at, 3)
            assert len({first, second, third}) == 3
            os.kill(second.pid, signal.SIGCONT)  # with the report that it had not read yet
            await asyncio.to_thread(second.await_line, "lease at etcd is given up")
            await decided_after("the leader of etcd was killed", cluster.leader().kill, both, 3)
            for agent in both:
                agent.session.send(RanksFinished(agent.id, 4))
            ended = [await agent.expect(Ended) for agent in both]
        for outcome in (one.outcome for one in ended):
            assert (outcome.succeeded, outcome.restarts) == (True, 3)
            restarts = [d.generation for d in outcome.decisions if d.kind is DecisionKind.RESTART]
            assert restarts == [1, 2, 3]
        assert [replicas.who_said("decision", g) for g in (1, 2)] == [[second], [third]]
        assert len(replicas.who_said("decision", 3)) == 1

    with contextlib.closing(Replicas(cluster)) as replicas:
        soon(story(replicas))


# --- one service, whose store is a file ------------------------------------------------------------------------

# Each step is an all-reduce: it goes on only while both ranks do.
_TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
path = os.path.join(sys.argv[1], f"steps-{restart}-{rank}")
step, over = 0, torch.zeros(1)
while not over.item():
    step += 1
    over.fill_(os.path.exists(os.path.join(sys.argv[1], "enough")))
    dist.all_reduce(over)
    with open(path + ".part", "w") as file:
        file.write(f"{os.getpid()} {step}")
    os.rename(path + ".part", path)
    time.sleep(0.01)
dist.destroy_process_group()
"""


class Steps:
    """What the ranks of one restart have done, as they write it down."""

    def __init__(self, folder: Path, restart: int) -> None:
        self._paths = [folder / f"steps-{restart}-{rank}" for rank in (0, 1)]
        eventually(lambda: all(path.exists() for path in self._paths), what=f"ranks of restart {restart}")
        self.pids = [pid for pid, _ in self._now()]

    def _now(self) -> Iterator[tuple[int, int]]:
        for path in self._paths:
            pid, step = path.read_text().split()
            yield int(pid), int(step)

    def go_on(self) -> None:
        """In the same processes."""
        before = list(self._now())
        eventually(lambda: all(now[1] > was[1] + 5 for now, was in zip(self._now(), before, strict=True)))
        assert [pid for pid, _ in self._now()] == self.pids


def both_nodes(launch: Launch, tmp_path: Path, endpoint: str) -> list[Launched]:
    where = ("--nnodes", "2", "--nproc-per-node", "1", "--rendezvous", endpoint, "--rdzv-id", "job")
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    return [launch(*where, "--max-restarts", "3", str(script), str(tmp_path)) for _ in range(2)]


def test_ranks_do_not_notice_that_the_service_died_and_came_back(launch: Launch, tmp_path: Path) -> None:
    store = ("--store", f"file:{tmp_path}/jobs")
    with serving(*store) as first:
        nodes = both_nodes(launch, tmp_path, first.endpoint)
        steps = Steps(tmp_path, 0)
        first.end(signal.SIGKILL)
        steps.go_on()
        with serving(*store, listen=first.endpoint) as second:
            steps.go_on()
            os.kill(steps.pids[1], signal.SIGKILL)
            again = Steps(tmp_path, 1)
            again.go_on()
            assert not set(again.pids) & set(steps.pids)
            (tmp_path / "enough").touch()
            assert [node.wait() for node in nodes] == [0, 0], [node.stderr() for node in nodes]
            decisions = [line for line in itertools.chain(first.log, second.log) if "kind=decision" in line]
            assert len([line for line in decisions if "restart: " in line]) == 1, decisions
    for node in nodes:
        assert node.stderr().count("restarting with the same nodes") == 1, node.stderr()
        assert not (tmp_path / "steps-2-0").exists()
        node.assert_nothing_left()
