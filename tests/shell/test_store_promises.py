"""What every store promises, asked of each of them."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from etcd_cluster import running

from rendezvous.store.open import open_store
from rendezvous.store.protocol import KEY_BYTES, KEYS_PER_JOB, VALUE_BYTES, Conflict, LimitReached
from rendezvous.values.state import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from rendezvous.store.protocol import Store

_ETCD = pytest.param(
    "etcd", marks=pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
)


@pytest.fixture(scope="module")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("etcd") is None:
        yield ""
        return
    with running(tmp_path_factory.mktemp("etcd"), n=1) as cluster:
        yield cluster.url("")


@pytest.fixture(params=["memory", "file", _ETCD])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = str(request.param)
    if kind == "etcd":
        return str(request.getfixturevalue("etcd_url")) + tmp_path.name
    return {"memory": "memory", "file": f"file:{tmp_path}/store.db"}[kind]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = await open_store(url, "here:29400")
    try:
        yield store
    finally:
        await store.close()


def test_a_job_is_written_by_compare_and_swap(url: str) -> None:
    async def check() -> None:
        async with opened(url) as store:
            assert (await store.ownership.claim("j")).is_me
            job = store.job("j")
            assert await job.load() == (JobState(), 0)
            first = await job.save(JobState(generation=1), 0)
            with pytest.raises(Conflict):
                await job.save(JobState(generation=9), 0)
            second = await job.save(JobState(generation=2), first)
            assert second > first
            with pytest.raises(Conflict):
                await job.save(JobState(generation=9), first)
            assert await job.load() == (JobState(generation=2), second)

    asyncio.run(check())


def test_nobody_overwrites_what_he_has_not_read(url: str) -> None:
    async def count(store: Store) -> None:
        job, done = store.job("j"), 0
        while done < 10:
            state, version = await job.load()
            try:
                await job.save(replace(state, generation=state.generation + 1), version)
            except Conflict:
                continue
            done += 1

    async def check() -> None:
        async with opened(url) as store:
            await store.ownership.claim("j")
            await asyncio.gather(*(count(store) for _ in range(8)))
            assert (await store.job("j").load())[0].generation == 80

    asyncio.run(check())


def test_jobs_are_listed_apart_and_forgotten(url: str) -> None:
    async def check() -> None:
        async with opened(url) as store:
            names = ["a", "a/b", "../a", "über 1", "%41"]
            versions = []
            for generation, name in enumerate(names):
                await store.ownership.claim(name)
                versions.append(await store.job(name).save(JobState(generation=generation), 0))
                await store.values(name).put("k", name.encode())
            assert await store.jobs() == sorted(names)
            await store.delete("a")
            await store.delete("never there")
            assert await store.jobs() == sorted(names[1:])
            assert await store.values("a").get("k") is None
            assert (await store.job("a").load())[1] == 0
            kept = await store.values("a/b").get("k")
            assert kept is not None
            assert kept.data == b"a/b"
            assert (await store.job("a/b").load())[0].generation == 1
            await store.ownership.claim("a")
            again = await store.job("a").save(JobState(), 0)
            if url != "memory":
                assert again > max(versions)  # a version never comes twice

    asyncio.run(check())


def test_scripts_keep_values(url: str) -> None:
    async def check() -> None:
        async with opened(url) as store:
            values, others = store.values("j"), store.values("k")
            assert await values.get("x") is None
            first = await values.put("x", b"1")
            second = await values.compare_and_put("x", b"2", first)
            with pytest.raises(Conflict):
                await values.compare_and_put("x", b"3", first)
            with pytest.raises(Conflict):
                await values.compare_and_put("x", b"3", 0)
            assert await values.compare_and_put("y", b"\0", 0) > second
            found = await values.get("x")
            assert found is not None
            assert (found.data, found.version) == (b"2", second)
            assert await others.get("x") is None
            assert await values.delete("x") is True
            assert await values.delete("x") is False
            assert await values.put("x", b"4") > second

    asyncio.run(check())


def test_whoever_waits_hears_of_the_next_value(url: str) -> None:
    async def check() -> None:
        async with opened(url) as store:
            values = store.values("j")
            waiting = [asyncio.create_task(values.wait("x")) for _ in range(3)]
            elsewhere = asyncio.create_task(values.wait("y"))
            await asyncio.sleep(0)
            first = await values.put("x", b"1")
            async with asyncio.timeout(60.0):
                assert [v.version for v in await asyncio.gather(*waiting)] == [first] * 3
                later = asyncio.create_task(values.wait("x", first))
                second = await values.compare_and_put("x", b"2", first)
                assert (await later).version == second
            assert not elsewhere.done()
            elsewhere.cancel()
            with pytest.raises(asyncio.CancelledError):
                await elsewhere

    asyncio.run(check())


def test_what_scripts_keep_is_bounded(url: str) -> None:
    async def check() -> None:
        async with opened(url) as store:
            values = store.values("j")
            for key, data in (("", b""), ("k" * (KEY_BYTES + 1), b""), ("k", bytes(VALUE_BYTES + 1))):
                with pytest.raises(LimitReached):
                    await values.put(key, data)
                with pytest.raises(LimitReached):
                    await values.compare_and_put(key, data, 0)
            await values.put("k" * KEY_BYTES, bytes(VALUE_BYTES))
            for start in range(1, KEYS_PER_JOB, 64):
                some = range(start, min(start + 64, KEYS_PER_JOB))
                await asyncio.gather(*(values.put(f"{i}", b"") for i in some))
            with pytest.raises(LimitReached):
                await values.put("one more", b"")
            with pytest.raises(LimitReached):
                await values.compare_and_put("one more", b"", 0)
            await values.put("1", b"one that is there")

    asyncio.run(check())
