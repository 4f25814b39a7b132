"""Lists of jobs: what they cost, what they show, and that they open no job. And how many jobs may be open."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from etcd_cluster import needs_etcd, running
from served import soon

from ddp_launch_wings.etcd.client import EtcdClient
from rendezvous.metrics import Metrics
from rendezvous.service import jobs as jobs_module
from rendezvous.service.agent_stream import LimitReached, ServiceLimits
from rendezvous.service.jobs import Jobs
from rendezvous.store.open import open_store
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import JobSpec, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from rendezvous.store.protocol import Store

_RUNNING = JobState(spec=JobSpec("job"), phase=Phase.RUNNING)
_ENDED = JobState(spec=JobSpec("job"), phase=Phase.ENDED, outcome=Outcome(True, "all ranks finished", 0))
_OWNED, _OVER = 60, 40


@pytest.fixture(scope="module")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("etcd"), n=1) as cluster:
        yield cluster.url("")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all requests to etcd, but for those that hold the lease."""
    made: list[str] = []
    call = EtcdClient.call

    async def counted(client: EtcdClient, method: object, *arguments: object, **more: object) -> object:
        if "Lease" not in method.path:  # type: ignore[attr-defined]
            made.append(method.path)  # type: ignore[attr-defined]
        return await call(client, method, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(EtcdClient, "call", counted)
    return made


@asynccontextmanager
async def replica(
    url: str, address: str, limits: ServiceLimits | None = None
) -> AsyncIterator[tuple[Store, Jobs]]:
    store = await open_store(url, address)
    jobs = Jobs(
        store, limits or ServiceLimits(), Metrics(), history_s=1e6, resume_grace_s=1.0, one_tenant=True
    )
    try:
        yield store, jobs
    finally:
        await jobs.close(0.0)
        await store.close()


async def fill(store: Store) -> None:
    for number in range(_OWNED + _OVER):
        job_id = f"job-{number:03d}"
        await store.ownership.claim(job_id)
        await store.job(job_id).save(_RUNNING if number < _OWNED else _ENDED, 0)
        if number >= _OWNED:
            await store.ownership.release(job_id)


@needs_etcd
def test_a_list_reads_what_is_new_once_and_opens_no_job(
    etcd_url: str, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_LOOK_EVERY_S", 0.0)

    async def story() -> None:
        async with (
            replica(f"{etcd_url}list", "a:1") as (a, _),
            replica(f"{etcd_url}list", "b:1") as (_, jobs),
        ):
            await fill(a)
            async with asyncio.timeout(60.0):
                while len((await jobs.listed())[1]) != _OWNED:  # noqa: ASYNC110  # the watch of the owners tells all
                    await asyncio.sleep(0.01)
            requests.clear()
            found, elsewhere = await jobs.listed()
            assert [job.job_id for job in found] == [f"job-{_OWNED + n:03d}" for n in range(_OVER)]
            assert {job.phase for job in found} == {Phase.ENDED}
            assert elsewhere == {f"job-{n:03d}": "a:1" for n in range(_OWNED)}
            assert len(requests) == 1, "the names and versions of all jobs, and no state again"
            assert len(jobs) == 0
            assert (await jobs.listed())[0] == found

    soon(story())


@needs_etcd
def test_all_who_ask_at_once_share_one_look(etcd_url: str, requests: list[str]) -> None:
    async def story() -> None:
        async with replica(f"{etcd_url}share", "a:1") as (store, jobs):
            await store.ownership.claim("over")
            await store.job("over").save(_ENDED, 0)
            requests.clear()
            lists = await asyncio.gather(*(jobs.listed() for _ in range(100)))
            assert [job.job_id for job in lists[99][0]] == ["over"]
            assert len(requests) == 3  # names, the state of the job, and its past

    soon(story())


def test_a_changed_job_is_listed_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_LOOK_EVERY_S", 0.0)

    async def story() -> None:
        async with replica(f"file:{tmp_path}/jobs", "a:1") as (store, jobs):
            version = await store.job("one").save(_RUNNING, 0)
            assert [job.phase for job in (await jobs.listed())[0]] == [Phase.RUNNING]
            await store.job("one").save(_ENDED, version)
            assert [job.phase for job in (await jobs.listed())[0]] == [Phase.ENDED]
            await store.delete("one")
            assert (await jobs.listed())[0] == []

    soon(story())


def test_the_limit_on_jobs_holds_for_those_that_are_opened_at_the_same_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with replica(f"file:{tmp_path}/jobs", "a:1", ServiceLimits(jobs=3)) as (store, jobs):
            await store.job("over").save(_ENDED, 0)
            opened = await asyncio.gather(*(jobs.open(f"j{n}") for n in range(50)), return_exceptions=True)
            assert sum(isinstance(each, LimitReached) for each in opened) == 47
            assert len(jobs) == 3
            with pytest.raises(LimitReached, match="--max-jobs"):
                await jobs.open("one more")

    soon(story())


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_question_about_a_job_that_does_not_exist_leaves_nothing(tmp_path: Path, kind: str) -> None:
    async def story() -> None:
        async with replica("memory" if kind == "memory" else f"file:{tmp_path}/jobs", "a:1") as (store, jobs):
            assert await jobs.find("no-such-job") is None
            assert (len(jobs), await store.jobs()) == (0, {})

    soon(story())
