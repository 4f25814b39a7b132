"""Replicas of the service over a real etcd: one owns a job, the next one has it soon after, and only one writes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from etcd_cluster import needs_etcd, running

from ddp_launch_wings.etcd.client import REVOKE
from ddp_launch_wings.etcd.owner import hangs
from ddp_launch_wings.etcd.store import EtcdStore
from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.open import open_store
from rendezvous.store.protocol import Conflict, OwnershipLost
from rendezvous.values.job_state import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from etcd_cluster import EtcdCluster

pytestmark = needs_etcd
_REPLICA = Path(__file__).parent / "programs" / "etcd_replica.py"
_FAIL_OVER_S = 30.0  # 3 s on a machine that has nothing else to do


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: EtcdCluster) -> Iterator[EtcdCluster]:
    yield shared
    shared.heal()


@pytest.fixture
def url(cluster: EtcdCluster, request: pytest.FixtureRequest) -> str:
    return cluster.url(request.node.name)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Replica:
    """A process of its own, which owns job "j" as soon as nobody does."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []
        self._more = asyncio.Condition()

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._more:
                self.said.append(json.loads(line))
                self._more.notify_all()

    async def until(self, what: str, after: float = 0.0) -> dict[str, Any]:
        """What it first said of this kind after that instant."""
        seen = 0
        async with asyncio.timeout(60.0), self._more:
            while True:
                for line in self.said[seen:]:
                    if line["what"] == what and line["at"] > after:
                        return line
                seen = len(self.said)
                await self._more.wait()


async def first_of(*replicas: Replica, after: float = 0.0) -> tuple[Replica, float]:
    """Whichever writes first after that instant, and when."""
    waiting = {asyncio.create_task(r.until("saved", after)): r for r in replicas}
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    task = done.pop()
    return waiting[task], (await task)["at"]


@asynccontextmanager
async def replica(url: str, name: str, ttl_s: int = 2, hung_after_s: float = 60.0) -> AsyncIterator[Replica]:
    root = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_REPLICA),
        url,
        name,
        "j",
        str(ttl_s),
        str(hung_after_s),
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        env={**os.environ, "PYTHONPATH": root},
    )
    it = Replica(process)
    listening = asyncio.create_task(it.listen())
    try:
        yield it
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await listening


@asynccontextmanager
async def opened(url: str, address: str) -> AsyncIterator[EtcdStore]:
    store = await open_store(url, address)
    assert isinstance(store, EtcdStore)
    try:
        yield store
    finally:
        await store.close()


def test_one_owns_and_the_others_know_who(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_launch_wings.etcd.owner._TTL_S", 600)

    async def check() -> None:
        async with opened(url, "a:1") as a, opened(url, "b:1") as b:
            owners = await asyncio.gather(*(s.ownership.claim("j") for s in (a, b, a, b)))
            address = owners[0].address
            assert {o.address for o in owners} == {address}
            assert [o.is_me for o in owners] == [address == "a:1", address == "b:1"] * 2
            mine, other = (a, b) if address == "a:1" else (b, a)
            assert mine.ownership.holds("j")
            assert not other.ownership.holds("j")
            known = await other.ownership.owner_of("j")
            assert known is not None
            assert (known.address, known.is_me) == (address, False)
            await mine.job("j").save(JobState(), 0)
            with pytest.raises(OwnershipLost):
                await other.job("j").save(JobState(), 0)
            with pytest.raises(OwnershipLost):
                await other.delete("j")
            assert list(await mine.jobs()) == ["j"]

    asyncio.run(check())


def test_a_released_job_and_a_closed_replica_are_free_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before any lease is over."""
    monkeypatch.setattr("ddp_launch_wings.etcd.owner._TTL_S", 600)

    async def check() -> None:
        freed: asyncio.Queue[str] = asyncio.Queue()
        async with opened(url, "a:1") as a, opened(url, "b:1") as b:
            b.ownership.listen(lambda job: None, freed.put_nowait)
            await a.ownership.claim("j")
            stale = a.job("j")
            version = await stale.save(JobState(), 0)
            assert not (await b.ownership.claim("j")).is_me
            await a.ownership.release("j")
            async with asyncio.timeout(60.0):
                assert await freed.get() == "j"
            assert (await b.ownership.claim("j")).is_me
            with pytest.raises(OwnershipLost):
                await stale.save(JobState(), version)
            await b.ownership.release("j")
            again = await a.ownership.claim("j")
            assert again.is_me
            with pytest.raises(OwnershipLost):  # the claim it was made for is over, whoever owns the job now
                await stale.save(JobState(), version)
            await a.job("j").save(JobState(), version)
            await a.close()
            async with asyncio.timeout(60.0):
                assert await freed.get() == "j"
            assert (await b.ownership.claim("j")).is_me

    asyncio.run(check())


def test_etcd_itself_refuses_the_write_of_a_deposed_owner(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is gone and the job another's, but it does not know yet: no clock here, the transaction alone."""
    monkeypatch.setattr("ddp_launch_wings.etcd.owner._TTL_S", 600)

    async def check() -> None:
        async with opened(url, "a:1") as a, opened(url, "b:1") as b:
            await a.ownership.claim("j")
            old = a.job("j")
            version = await old.save(JobState(generation=1), 0)
            claim = a.ownership.claim_of("j")
            assert claim is not None
            a.ownership.__dict__["_following"].cancel()  # the news does not reach it
            await b.__dict__["_client"].call(REVOKE, pb.LeaseRevokeRequest(ID=claim.lease_id))
            assert (await b.ownership.claim("j")).is_me
            assert a.ownership.is_held(claim)
            assert a.ownership.holds("j")
            with pytest.raises(OwnershipLost):
                await old.save(JobState(generation=2), version)
            assert (await b.job("j").load())[0].generation == 1
            await b.job("j").save(JobState(generation=3), version)
            with pytest.raises((OwnershipLost, Conflict)):
                await old.save(JobState(generation=2), version)
            assert (await b.job("j").load())[0].generation == 3

    asyncio.run(check())


_ENDS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "its loop hangs": signal.SIGUSR1}
_AWAKES = {"frozen": signal.SIGCONT, "its loop hangs": signal.SIGUSR2}


@pytest.mark.parametrize(
    "end",
    ["frozen", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("killed", "its loop hangs"))],
)
def test_the_next_owner_soon_has_the_job(url: str, end: str) -> None:
    """A frozen one that wakes up finds its time over: it writes nothing more, and says nothing more as its owner.

    But for the one word that the freeze broke off: of a write that was done, and certain, before it. The same is true
    if only its event loop hangs, while the thread that renews its lease runs.
    """

    async def check() -> None:
        async with replica(url, "a:1", hung_after_s=2.0) as first:
            await first.until("saved")
            async with replica(url, "b:1") as second:
                await second.until("waits")
                ended = now()
                first.process.send_signal(_ENDS[end])
                taken = await second.until("saved")
                assert taken["at"] - ended < _FAIL_OVER_S
                if end == "killed":
                    return
                woken = now()
                first.process.send_signal(_AWAKES[end])
                await first.until("waits", woken)
                after = [line for line in first.said if line["at"] > woken]
                if after[0]["what"] == "saved":
                    assert after.pop(0)["version"] < taken["version"]
                words = [line["what"] for line in after]
                assert words[-1] == "waits"
                assert "lost" in words
                assert "saved" not in words
                reached = await second.until("saved", woken)
                assert reached["generation"] >= taken["generation"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("silent_s", "cpu_s", "does"),
    [(4.9, 0.0, False), (5.1, 0.01, True), (5.1, 5.05, True), (5.1, 1.0, False), (15.1, 4.0, True)],
)
def test_a_loop_hangs_that_waits_or_spins_and_not_one_that_others_slow_down(
    silent_s: float, cpu_s: float, does: bool
) -> None:
    assert hangs(silent_s, cpu_s) is does


def test_an_owner_whose_loop_is_busy_keeps_its_jobs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not turn until its lease was renewed twice, by a thread that must be given the interpreter.

    The lease is four times as long as in operation, as others may use this machine.
    """
    monkeypatch.setattr("ddp_launch_wings.etcd.owner._TTL_S", 8)
    monkeypatch.setattr("ddp_launch_wings.etcd.owner.HUNG_AFTER_S", 60.0)
    lost = []

    async def check() -> None:
        async with opened(url, "a:1") as a, opened(url, "b:1") as b:
            a.ownership.listen(lost.append, lambda job: None)
            await a.ownership.claim("j")
            claim = a.ownership.claim_of("j")
            assert claim is not None
            version = await a.job("j").save(JobState(generation=1), 0)
            held, renewals = a.ownership._keeper._held, set[float]()
            assert held is not None
            give_up_at = time.monotonic() + 60.0
            while len(renewals) < 3 and time.monotonic() < give_up_at:
                renewals.add(held.proven.proven_at)
            assert len(renewals) == 3
            assert a.ownership.holds("j")
            await a.job("j").save(JobState(generation=2), version)
            assert a.ownership.is_held(claim)
            assert (await b.ownership.claim("j")).address == "a:1"
        assert lost == []

    asyncio.run(check())


def test_what_two_owners_wrote_is_one_history(url: str) -> None:
    """Frozen and woken again and again, in turn: every generation was written once, by one of them."""

    async def check() -> None:
        async with replica(url, "a:1") as a, replica(url, "b:1") as b:
            for _ in range(3):
                holder, _at = await first_of(a, b, after=now())
                other = b if holder is a else a
                frozen = now()
                holder.process.send_signal(signal.SIGSTOP)
                await other.until("saved", frozen)
                holder.process.send_signal(signal.SIGCONT)
                await holder.until("waits", frozen)
            await first_of(a, b, after=now())
            written = [line for r in (a, b) for line in r.said if line["what"] == "saved"]
            by_version = sorted(written, key=lambda line: line["version"])
            generations = [line["generation"] for line in by_version]
            assert generations == sorted(set(generations))

    asyncio.run(check())
