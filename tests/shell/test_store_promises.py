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
from rendezvous.store.protocol import KEY_BYTES, KEYS_PER_JOB, MANY_NODES, VALUE_BYTES, Conflict, ValuesFull
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import JobState, Member
from rendezvous.values.types import AgentId, JobSpec, NodeFacts

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


# --- large jobs: most writes have only what has changed -------------------------------------------------


def _large(nodes: int) -> JobState:
    found = []
    for i in range(nodes):
        agent = AgentId(f"node{i}", "1")
        found.append((agent.node, Member(agent, NodeFacts(agent.node, "10.0.0.1", 8), i, i)))
    return JobState(spec=JobSpec("j", nodes, nodes), generation=1, members=FrozenMap(found))


def _next(state: JobState, number: int) -> JobState:
    """One node of them all leaves or returns; now and then all of them change."""
    node = f"node{number * 7 % len(state.members)}"
    member = state.members[node]
    moved = replace(member, node_rank=None if member.node_rank is not None else number)
    members = state.members.plus(node, moved)
    if number % 10 == 9:
        members = FrozenMap((n, replace(m, arrival=number)) for n, m in members.items())
    return replace(state, members=members, restarts_used=number, as_of=float(number))


def _kept(state: JobState) -> JobState:
    return replace(state, leases=FrozenMap())


def test_a_large_job_is_read_as_it_was_written(url: str) -> None:
    async def check() -> None:
        async with opened(url) as store:
            await store.ownership.claim("j")
            job, state, version = store.job("j"), _large(MANY_NODES), 0
            for number in range(25):
                state = _next(state, number)
                version = await job.save(state, version)
                if number % 4 == 0:  # by another, who knows of no earlier write
                    found, at = await store.job("j").load()
                    assert (_kept(found), at) == (_kept(state), version)
            with pytest.raises(Conflict):
                await store.job("j").save(state, version - 1)
            few = replace(state, members=FrozenMap(list(state.members.items())[:3]))
            version = await job.save(few, version)  # it is small now ...
            assert await store.job("j").load() == (few, version)
            version = await job.save(state, version)  # ... and large again
            found, at = await store.job("j").load()
            assert (_kept(found), at) == (_kept(state), version)
            await store.delete("j")
            assert list(await store.jobs()) == []
            await store.ownership.claim("j")
            assert (await store.job("j").load())[1] == 0

    asyncio.run(check())


def test_two_who_write_a_large_job_in_turns_lose_nothing(url: str) -> None:
    """Each writes changes to a snapshot; the other one's write in between makes its snapshot void."""

    async def count(store: Store) -> None:
        job, done = store.job("j"), 0
        state, version = await job.load()
        while done < 8:
            try:
                state = _next(state, state.restarts_used + 1)
                version = await job.save(state, version)
            except Conflict:
                state, version = await job.load()
                continue
            done += 1
            await asyncio.sleep(0)

    async def check() -> None:
        async with opened(url) as store:
            await store.ownership.claim("j")
            await store.job("j").save(_large(MANY_NODES), 0)
            await asyncio.gather(*(count(store) for _ in range(3)))
            found, _ = await store.job("j").load()
            expected = _large(MANY_NODES)
            for number in range(1, 25):
                expected = _next(expected, number)
            assert _kept(found) == _kept(expected)

    asyncio.run(check())


def test_a_write_that_was_given_up_is_there_or_not(url: str) -> None:
    """As after the end of a process in the middle of a write: what is read is a state that was written, whole.

    A write that was given up may still be on its way to etcd, and arrive after the next read.
    """

    async def check() -> None:
        async with opened(url) as store:
            await store.ownership.claim("j")
            job, state = store.job("j"), _large(MANY_NODES)
            version = await job.save(state, 0)
            written, given_up = {0.0: state}, 0
            for number in range(1, 40):
                after = written[float(number)] = _next(state, number)
                write = asyncio.create_task(job.save(after, version))
                for _ in range(number // 2):
                    await asyncio.sleep(0)
                write.cancel()
                await asyncio.wait([write])
                given_up += write.cancelled()
                found, version = await job.load()
                assert _kept(found) == _kept(written[found.as_of])
                assert found.as_of >= state.as_of
                state = found
            assert given_up or url == "memory"

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
            assert list(await store.jobs()) == sorted(names)
            await store.delete("a")
            await store.delete("never there")
            assert list(await store.jobs()) == sorted(names[1:])
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
                with pytest.raises(ValuesFull):
                    await values.put(key, data)
                with pytest.raises(ValuesFull):
                    await values.compare_and_put(key, data, 0)
            await values.put("k" * KEY_BYTES, bytes(VALUE_BYTES))
            for start in range(1, KEYS_PER_JOB, 64):
                some = range(start, min(start + 64, KEYS_PER_JOB))
                await asyncio.gather(*(values.put(f"{i}", b"") for i in some))
            with pytest.raises(ValuesFull):
                await values.put("one more", b"")
            with pytest.raises(ValuesFull):
                await values.compare_and_put("one more", b"", 0)
            await values.put("1", b"one that is there")

    asyncio.run(check())
