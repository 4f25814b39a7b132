"""A real etcd of three members, some of which are dead, hung, compacted, locked or encrypted."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from etcd_cluster import issue, make_certificates, needs_etcd, running
from launched import eventually

from ddp_launch_wings.etcd.client import COMPACT, TXN, Access, EtcdClient, putting, when
from ddp_launch_wings.etcd.owner import Changes, EtcdOwnership, Follower, Snapshot
from ddp_launch_wings.etcd.store import PASSWORD_VARIABLE
from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.open import open_store
from rendezvous.store.protocol import StoreError
from rendezvous.values.job_state import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from etcd_cluster import EtcdCluster, Member

    from rendezvous.store.protocol import JobStore, Store

pytestmark = needs_etcd
_PREFIX = b"/follow/"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: EtcdCluster) -> Iterator[EtcdCluster]:
    yield shared
    shared.heal()


@asynccontextmanager
async def opened(url: str, address: str = "here:1", **environ: str) -> AsyncIterator[Store]:
    store = await open_store(url, address, environ)
    try:
        yield store
    finally:
        await store.close()


async def _saved(store: Store, job: JobStore, version: int, times: int) -> tuple[int, float]:
    """The last version, and the longest that one save took. A claim that is lost on the way is made anew."""
    longest_s = 0.0
    for _ in range(times):
        started = time.monotonic()
        version = await job.save(JobState(generation=version), version)
        longest_s = max(longest_s, time.monotonic() - started)
    return version, longest_s


def _follower_of_the_leader(cluster: EtcdCluster) -> Member:
    leader = cluster.leader()
    return next(m for m in cluster.members if m is not leader)


def _member_in_use(cluster: EtcdCluster, client: EtcdClient) -> Member:
    port = int(client.member().endpoint.rpartition(":")[2])
    return next(m for m in cluster.members if m.client_port == port)


def _client(cluster: EtcdCluster) -> EtcdClient:
    return EtcdClient(Access(tuple(cluster.hosts.split(","))))


@pytest.mark.parametrize("fault", [pytest.param("killed", marks=pytest.mark.nightly), "hung"])
def test_a_member_that_is_gone_is_passed_by(
    cluster: EtcdCluster, fault: str, request: pytest.FixtureRequest
) -> None:
    """The very member that is in use, and not the leader: the others answer at once."""

    async def check() -> None:
        async with opened(cluster.url(request.node.name)) as store:
            victim = _follower_of_the_leader(cluster)
            client = _client_of(store)
            while _member_in_use(cluster, client) is not victim:
                client.switch_from(client.member())
            ownership = _ownership_of(store)
            await ownership.claim("j")
            claim = ownership.claim_of("j")
            assert claim is not None
            job = store.job("j")
            version, _ = await _saved(store, job, 0, 5)
            victim.kill() if fault == "killed" else victim.hang()
            version, longest_s = await _saved(store, job, version, 5)
            assert longest_s < 60.0
            async with asyncio.timeout(60.0):
                await ownership.wait_until_certain(claim)  # the lease is not lost over it
            assert (await job.load())[1] == version

    asyncio.run(check())


@pytest.mark.parametrize("fault", ["killed", pytest.param("hung", marks=pytest.mark.nightly)])
def test_a_leader_that_is_gone_costs_an_election(
    cluster: EtcdCluster, fault: str, request: pytest.FixtureRequest
) -> None:
    async def check() -> None:
        async with opened(cluster.url(request.node.name)) as store:
            values = store.values("j")
            await values.put("k", b"0")
            leader = cluster.leader()
            leader.kill() if fault == "killed" else leader.hang()
            async with asyncio.timeout(60.0):
                await values.put("k", b"1")
                found = await values.get("k")
                assert found is not None
                assert found.data == b"1"
                assert (await store.ownership.claim("again")).is_me

    asyncio.run(check())


def test_callers_wait_while_all_of_etcd_is_away(
    cluster: EtcdCluster, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    caplog.set_level(logging.WARNING, "ddp_launch_wings.etcd.client")

    async def check() -> None:
        async with opened(cluster.url(request.node.name)) as store:
            values = store.values("j")
            acknowledged = [await values.put(f"{i}", b"before") for i in range(20)]
            for member in cluster.members:
                member.kill()
            putting_on = asyncio.create_task(values.put("0", b"meanwhile"))
            await asyncio.to_thread(eventually, lambda: complaints(caplog), what="it says so")
            await asyncio.wait([putting_on], timeout=2.5)
            assert not putting_on.done()
            assert complaints(caplog) <= 4  # neither the values nor the lease go on about it
            for member in cluster.members:
                cluster.start_member(member)
            async with asyncio.timeout(60.0):
                assert await putting_on > max(acknowledged)
                for i in range(1, 20):
                    found = await values.get(f"{i}")
                    assert found is not None
                    assert found.version == acknowledged[i]

    asyncio.run(check())


def complaints(caplog: pytest.LogCaptureFixture) -> int:
    return sum("does not answer" in record.message for record in caplog.records)


class _Heard:
    """What a follower was told, put together again."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.pictures = 0
        self._changed = asyncio.Event()

    def __call__(self, news: Snapshot | Changes) -> None:
        match news:
            case Snapshot(_, entries):
                self.pictures += 1
                self.held = {kv.key: kv.value for kv in entries}
            case Changes(events):
                for event in events:
                    assert event.type == pb.Event.PUT
                    self.held[event.kv.key] = event.kv.value
        self._changed.set()

    async def until(self, key: bytes, value: bytes) -> None:
        async with asyncio.timeout(60.0):
            while self.held.get(key) != value:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def following(client: EtcdClient, heard: _Heard) -> AsyncIterator[None]:
    task = asyncio.create_task(Follower(client, _PREFIX, heard).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _put(client: EtcdClient, key: bytes, value: bytes) -> int:
    return await _put_all(client, {key: value})


async def _put_all(client: EtcdClient, entries: dict[bytes, bytes]) -> int:
    """In one revision."""
    puts = [putting(_PREFIX + key, value) for key, value in entries.items()]
    return (await client.call(TXN, when([], puts))).header.revision


@pytest.mark.parametrize("compacted", [False, True], ids=["kept", "compacted"])
def test_a_watch_misses_nothing_while_its_member_hangs(
    cluster: EtcdCluster, compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the missed revisions compacted away, a new picture makes up for them."""
    monkeypatch.setattr("ddp_launch_wings.etcd.owner._IDLE_S", 2.0)  # it notices when all is written

    async def check() -> None:
        watching, writing, heard = _client(cluster), _client(cluster), _Heard()
        victim = _follower_of_the_leader(cluster)
        while _member_in_use(cluster, watching) is not victim:
            watching.switch_from(watching.member())
        while _member_in_use(cluster, writing) is victim:
            writing.switch_from(writing.member())
        async with following(watching, heard):
            await _put(writing, b"a", b"first")
            await heard.until(_PREFIX + b"a", b"first")
            pictures = heard.pictures
            _member_in_use(cluster, watching).hang()  # the victim, unless that was slow to answer
            for turn in range(3):
                written = {b"%d" % i: b"%d, compacted: %d" % (turn, compacted) for i in range(7)}
                last = await _put_all(writing, written)
            if compacted:
                await writing.call(COMPACT, pb.CompactionRequest(revision=last))
            await heard.until(_PREFIX + b"6", written[b"6"])
            for key, value in written.items():
                assert heard.held[_PREFIX + key] == value
            assert heard.pictures == pictures + compacted
        await watching.close()
        await writing.close()

    asyncio.run(check())


def test_a_watch_outlives_the_loss_of_the_quorum(cluster: EtcdCluster) -> None:
    """Two of three hang; when they come back, the third does."""

    async def check() -> None:
        watching, heard = _client(cluster), _Heard()
        left = _member_in_use(cluster, watching)
        async with following(watching, heard):
            await _put(watching, b"b", b"1")
            await heard.until(_PREFIX + b"b", b"1")
            others = [m for m in cluster.members if m is not left]
            for member in others:
                member.hang()
            await asyncio.sleep(1.5)  # the silence itself is what is tried here
            left.hang()
            for member in others:
                member.go_on()
            writing = _client(cluster)
            async with asyncio.timeout(60.0):
                await _put(writing, b"b", b"2")
            await heard.until(_PREFIX + b"b", b"2")
            await writing.close()
        await watching.close()

    asyncio.run(check())


# --- who may, and over what


def _client_of(store: Store) -> EtcdClient:
    client = getattr(store, "_client", None)
    assert isinstance(client, EtcdClient)
    return client


def _ownership_of(store: Store) -> EtcdOwnership:
    assert isinstance(store.ownership, EtcdOwnership)
    return store.ownership


def test_a_password_is_asked_for_and_kept_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def check(cluster: EtcdCluster) -> None:
        url = cluster.url("secured")
        with pytest.raises(StoreError, match="requires a user and a password"):
            await open_store(url, "here:1", {})
        named = url.replace("etcd://", "etcd://root@")
        with pytest.raises(StoreError, match="invalid user ID or password") as refused:
            await open_store(named, "here:1", {PASSWORD_VARIABLE: "wr0ng-one"})
        assert "wr0ng-one" not in str(refused.value)
        (tmp_path / "password").write_text("s3cret\n")
        from_file = f"{named}?password-file={tmp_path}/password"
        for where, environ in ((named, {PASSWORD_VARIABLE: "s3cret"}), (from_file, {})):
            async with opened(where, **environ) as store:
                assert (await store.ownership.claim("j")).is_me
                await store.job("j").save(JobState(), (await store.job("j").load())[1])
        async with opened(named, **{PASSWORD_VARIABLE: "s3cret"}) as store:
            values = store.values("j")
            await values.put("k", b"1")
            (member,) = cluster.members
            member.kill()  # and with it every token it gave out
            cluster.start_member(member)
            async with asyncio.timeout(60.0):
                await values.put("k", b"2")
                assert (await values.wait("k", 0)).data == b"2"

    with running(tmp_path, n=1) as cluster:
        (member,) = cluster.members
        member.post("auth/user/add", name="root", password="s3cret")
        member.post("auth/user/grant", user="root", role="root")
        member.post("auth/enable")
        asyncio.run(check(cluster))
    assert "s3cret" not in caplog.text


def test_tls_both_ways_and_renewed_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_launch_wings.etcd.client._CHECK_FILES_EVERY_S", 0.0)
    monkeypatch.setattr("ddp_launch_wings.etcd.owner._TTL_S", 600)  # nothing is renewed while openssl runs
    certificates = make_certificates(tmp_path / "tls")

    async def check(cluster: EtcdCluster) -> None:
        async with opened(cluster.url("tls")) as store:
            assert (await store.ownership.claim("j")).is_me
            values = store.values("j")
            waiting = asyncio.create_task(values.wait("never"))
            before = await values.put("k", b"1")
            first = _serial(_client_of(store))
            issue(certificates.folder, "client")
            assert await values.put("k", b"2") > before
            assert _serial(_client_of(store)) is not first
            assert store.ownership.holds("j")
            await values.put("never", b"after all")
            async with asyncio.timeout(60.0):
                assert (await waiting).data == b"after all"
        without = cluster.url("tls").partition("?")[0] + f"?cacert={certificates.folder}/ca.crt"
        monkeypatch.setattr("ddp_launch_wings.etcd.store._FIRST_ANSWER_S", 1.0)
        with pytest.raises(StoreError, match="no answer from etcd"):
            await open_store(without, "here:1")

    with running(tmp_path, tls=certificates) as cluster:
        asyncio.run(check(cluster))


def _serial(client: EtcdClient) -> object:
    """The connection in use, as an object that is another one once it was renewed."""
    return client.member().__dict__["_channel"]


def test_nobody_there_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_launch_wings.etcd.store._FIRST_ANSWER_S", 0.5)
    with pytest.raises(StoreError, match=r"no answer from etcd at 127\.0\.0\.1:1, \[::1\]:2379"):
        asyncio.run(open_store("etcd://127.0.0.1:1,[::1]/x", "here:1"))
