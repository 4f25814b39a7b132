"""A watch of etcd that catches up in parts, large values, and compaction in the middle: nothing is lost."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from etcd_cluster import needs_etcd, running

from ddp_launch_wings.etcd.client import (
    COMPACT,
    TXN,
    Access,
    EtcdClient,
    Member,
    Unreachable,
    pages_of,
    putting,
    unavailable,
    when,
)
from ddp_launch_wings.etcd.owner import Changes, Follower, Snapshot
from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.open import open_store
from rendezvous.store.protocol import KEYS_PER_JOB, VALUE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from etcd_cluster import EtcdCluster

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("etcd"), n=1) as cluster:
        yield cluster


class _Breaking(Member):
    """Its streams break after each answer with events. While `gate` is shut, there are no new streams."""

    gate: asyncio.Event

    async def stream(self, *arguments: Any) -> Any:
        await self.gate.wait()
        return _OneAnswer(await super().stream(*arguments))


class _OneAnswer:
    def __init__(self, stream: Any) -> None:
        self._stream, self._is_over = stream, False
        self.write, self.cancel = stream.write, stream.cancel

    async def read(self) -> Any:
        if self._is_over:
            return grpc.aio.EOF
        answer = await self._stream.read()
        self._is_over = isinstance(answer, pb.WatchResponse) and bool(answer.events)
        return answer


class _Heard:
    """What the follower has told, and when it tells it next."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.snapshots = self.answers = 0
        self._changed = asyncio.Event()

    def __call__(self, news: Snapshot | Changes) -> None:
        if isinstance(news, Snapshot):
            self.snapshots += 1
            self.keys |= {kv.key for kv in news.entries}
        else:
            self.answers += 1
            self.keys |= {event.kv.key for event in news.events}
        self._changed.set()

    async def until(self, is_it: Any) -> None:
        async with asyncio.timeout(60.0):
            while not is_it():
                self._changed.clear()
                await self._changed.wait()


class _Scene:
    def __init__(self, cluster: EtcdCluster, prefix: bytes) -> None:
        self.access = Access((cluster.members[0].url.removeprefix("http://"),))
        self.prefix, self.heard, self.gate = prefix, _Heard(), asyncio.Event()
        _Breaking.gate = self.gate
        self.gate.set()
        self.writer, self.watcher = EtcdClient(self.access), EtcdClient(self.access, _Breaking)

    async def put(self, count: int, size: int = 1) -> list[bytes]:
        keys = [self.prefix + b"%05d" % number for number in range(count)]
        for at in range(0, count, 100):
            puts = [when([], [putting(key, bytes(size))]) for key in keys[at : at + 100]]
            await asyncio.gather(*(self.writer.call(TXN, put) for put in puts))
        return keys


@asynccontextmanager
async def a_follower_that_lost_its_stream(cluster: EtcdCluster, prefix: bytes) -> AsyncIterator[_Scene]:
    scene = _Scene(cluster, prefix)
    task = asyncio.create_task(Follower(scene.watcher, prefix, scene.heard).run())
    try:
        await scene.heard.until(lambda: scene.heard.snapshots)
        await scene.put(1)
        await scene.heard.until(lambda: scene.heard.answers)
        scene.gate.clear()
        yield scene
    finally:
        task.cancel()
        await asyncio.wait([task])
        await scene.writer.close()
        await scene.watcher.close()


def test_a_watch_whose_stream_breaks_while_it_catches_up_loses_nothing(cluster: EtcdCluster) -> None:
    async def check() -> None:
        async with a_follower_that_lost_its_stream(cluster, b"/gap/") as scene:
            keys = await scene.put(2500)  # etcd sends a thousand revisions at once
            scene.gate.set()
            await scene.heard.until(lambda: keys[-1] in scene.heard.keys)
            assert scene.heard.keys == set(keys)
            assert scene.heard.snapshots == 1
            assert scene.heard.answers > 2

    asyncio.run(check())


def test_what_was_compacted_while_it_catches_up_is_read_anew(cluster: EtcdCluster) -> None:
    async def check() -> None:
        async with a_follower_that_lost_its_stream(cluster, b"/compacted/") as scene:
            keys = await scene.put(1200)
            answers = scene.heard.answers
            scene.gate.set()
            await scene.heard.until(lambda: scene.heard.answers > answers)
            scene.gate.clear()
            await scene.put(1)
            revision, _ = await pages_of(scene.writer, scene.prefix, keys_only=True)
            await scene.writer.call(COMPACT, pb.CompactionRequest(revision=revision))
            scene.gate.set()
            await scene.heard.until(lambda: scene.heard.snapshots == 2)
            assert scene.heard.keys == set(keys)

    asyncio.run(check())


def test_a_catch_up_that_is_larger_than_a_message_comes_in_parts(cluster: EtcdCluster) -> None:
    async def check() -> None:
        async with a_follower_that_lost_its_stream(cluster, b"/large/") as scene:
            keys = await scene.put(280, VALUE_BYTES)  # 17.5 MiB; a message has 16
            scene.gate.set()
            await scene.heard.until(lambda: scene.heard.keys == set(keys))

    asyncio.run(check())


def test_a_job_with_as_many_and_as_large_values_as_are_permitted_wakes_its_waiters(
    cluster: EtcdCluster,
) -> None:
    async def check() -> None:
        store = await open_store(cluster.url("all"), "here:1")
        values = store.values("job")
        for at in range(0, KEYS_PER_JOB - 1, 50):
            some = range(at, min(at + 50, KEYS_PER_JOB - 1))
            await asyncio.gather(*(values.put(f"{number}", bytes(VALUE_BYTES)) for number in some))
        waiting = asyncio.create_task(values.wait("new"))
        await asyncio.sleep(0)
        await values.put("new", b"here")
        async with asyncio.timeout(60.0):
            assert (await waiting).data == b"here"
            later = asyncio.create_task(values.wait("new", (await waiting).version))
            await asyncio.sleep(0)
            await values.put("new", b"again")
            assert (await later).data == b"again"
        await store.close()

    asyncio.run(check())


class _Forgetful(Member):
    """The answer to its transaction is lost, after which somebody does this; None: it arrives."""

    meanwhile: list[Callable[[], Awaitable[object]] | None]

    async def ask(self, method: Any, *arguments: Any) -> Any:
        answer = await super().ask(method, *arguments)
        if method is TXN and self.meanwhile and (happens := self.meanwhile.pop(0)) is not None:
            await happens()
            raise unavailable("the answer is lost")
        return answer


@pytest.mark.parametrize("ours", ["new", "put", "delete", "compare"])
def test_a_write_whose_answer_is_lost_takes_effect_once(cluster: EtcdCluster, ours: str) -> None:
    """Another client writes between the attempts, and its value stays."""

    async def check() -> None:
        store, other = [await open_store(cluster.url(ours), f"{name}:1") for name in ("here", "there")]
        values, theirs = store.values("job"), other.values("job")
        (member,) = store._client.members  # type: ignore[attr-defined]
        member.__class__, member.meanwhile = _Forgetful, []
        version = 0 if ours == "new" else await values.put("key", b"before")
        change = partial(theirs.put, "key", b"theirs")
        member.meanwhile = [
            *([None] if ours == "new" else []),
            change,
            change,
        ]  # a new key takes two transactions
        if ours == "delete":
            assert await values.delete("key")
        elif ours == "compare":
            assert await values.compare_and_put("key", b"ours", version) > version
        else:
            assert await values.put("key", b"ours") > version
        assert not member.meanwhile
        found = await theirs.get("key")
        assert found is not None
        assert found.data == b"theirs"
        assert await values.put("key", b"later") > found.version
        await store.close()
        await other.close()

    asyncio.run(check())


def test_a_write_that_was_given_up_leaves_a_mark_that_is_used_again(cluster: EtcdCluster) -> None:
    async def check() -> None:
        store = await open_store(cluster.url("given-up"), "here:1")
        values, client = store.values("job"), EtcdClient(Access((cluster.hosts,)))
        for number in range(5):
            await values.put("key", b"%d" % number)
            giving_up = asyncio.create_task(values.put("key", b"given up"))
            await asyncio.sleep(0.001 * number)
            giving_up.cancel()
            await asyncio.wait([giving_up])
        assert await values.compare_and_put("key", b"last", await values.put("key", b"next"))
        assert len((await pages_of(client, b"/given-up/marks/", keys_only=True))[1]) == 1
        await store.delete("job")
        assert not (await pages_of(client, b"/given-up/", keys_only=True))[1]
        assert await values.put("key", b"of the next job of this name")
        await client.close()
        await store.close()

    asyncio.run(check())


def test_no_space_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ETCD_QUOTA_BACKEND_BYTES", str(2 << 20))

    async def fill(client: EtcdClient, give_up_at: float) -> None:
        for number in range(100):
            put = putting(b"/full/%d" % number, bytes(VALUE_BYTES))
            await client.call(TXN, when([], [put]), give_up_at=give_up_at)

    async def check(cluster: EtcdCluster) -> None:
        client = EtcdClient(Access((cluster.members[0].url.removeprefix("http://"),)))
        with pytest.raises(Unreachable):
            await fill(client, give_up_at=time.monotonic() + 5.0)
        await pages_of(client, b"/full/", keys_only=True)  # reads are served
        await client.close()

    with running(tmp_path, n=1) as cluster:
        asyncio.run(check(cluster))
    told = [record.getMessage() for record in caplog.records if "etcd" in record.getMessage()]
    assert len(told) == 1
    assert "has no space left" in told[0]
