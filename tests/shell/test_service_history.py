"""Finished jobs are kept for a while and then forgotten, whatever else is wrong in the store."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from served import soon

from rendezvous.metrics import Metrics
from rendezvous.rounds.event_log import decode_past
from rendezvous.service import jobs as jobs_module
from rendezvous.service.agent_stream import ServiceLimits
from rendezvous.service.jobs import _PAST, Jobs
from rendezvous.store.open import open_store
from rendezvous.store.protocol import KEYS_PER_JOB
from rendezvous.values.events import AgentJoined
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.questions import RestartTimes
from rendezvous.values.types import AgentId, JobSpec, NodeFacts, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rendezvous.store.protocol import Store

_HISTORY_S = 100.0
_FACTS = NodeFacts("node", "127.0.0.1", 1)
_RUNNING = JobState(spec=JobSpec("job"), phase=Phase.RUNNING)
_ENDED = JobState(spec=JobSpec("job"), phase=Phase.ENDED, outcome=Outcome(True, "all ranks finished", 0))


@asynccontextmanager
async def kept(url: str, most: int = 1000) -> AsyncIterator[tuple[Store, Jobs]]:
    store = await open_store(url)
    limits = ServiceLimits()
    jobs = Jobs(
        store, limits, Metrics(), history_s=_HISTORY_S, history_jobs=most, resume_grace_s=1.0, one_tenant=True
    )
    try:
        yield store, jobs
    finally:
        await jobs.close(0.0)
        await store.close()


def test_what_is_over_is_forgotten_when_its_time_is_up_and_nothing_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with kept(f"file:{tmp_path}/jobs") as (store, jobs):
            await store.job("over").save(_ENDED, 0)
            await store.job("running").save(_RUNNING, 0)
            await jobs.delete_old(1000.0, 1000.0)  # seen to be over for the first time
            await jobs.delete_old(1000.0 + _HISTORY_S, 1000.0 + _HISTORY_S)
            assert list(await store.jobs()) == ["over", "running"]
            await jobs.delete_old(1001.0 + _HISTORY_S, 1001.0 + _HISTORY_S)
            assert list(await store.jobs()) == ["running"]
            assert await store.values("over").get("rendezvous/ended-at") is None

    soon(story())


@pytest.mark.parametrize("jump_s", [1e6, -1e6])
def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path, jump_s: float) -> None:
    """While a service runs, while it is off, when the machine starts. The age grows with the time that passes."""
    url, start = f"file:{tmp_path}/jobs", 2e6

    async def looks(*clocks: tuple[float, float], left: list[str]) -> None:
        async with kept(url) as (store, jobs):
            for wall, monotonic in clocks:
                await jobs.delete_old(wall, monotonic)
            assert list(await store.jobs()) == left

    async def story() -> None:
        async with kept(url) as (store, _):
            for i in range(20):
                await store.job(f"job-{i:02}").save(_ENDED, 0)
        everything = [f"job-{i:02}" for i in range(20)]
        await looks((start, 0.0), (start + jump_s, 50.0), left=everything)
        await looks((start, 0.0), (start + 10.0, 10.0), (start + jump_s + 20.0, 20.0), left=everything)
        for _ in range(5):  # the machine starts with a wrong clock, which is corrected
            await looks((start + jump_s, 0.0), left=everything)
        await looks((start, 0.0), (start + jump_s, 5.0), left=everything)
        await looks((start + 300.0, 0.0), (start + 500.0, 200.0), (start + 700.0, 400.0), left=[])

    soon(story())


def test_with_too_many_finished_jobs_the_oldest_are_forgotten() -> None:
    async def story() -> None:
        async with kept("memory", most=3) as (store, jobs):
            await store.job("running").save(_RUNNING, 0)
            for i in range(300):
                await store.job(f"job-{i:03}").save(_ENDED, 0)
                await store.values(f"job-{i:03}").put("rendezvous/ended-at", str(1000.0 - i / 10).encode())
            await jobs.delete_old(1000.0, 1000.0)
            assert list(await store.jobs()) == ["job-000", "job-001", "job-002", "running"]

    soon(story())


def test_events_and_times_of_restarts_outlive_the_service_also_if_it_is_killed(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/jobs"

    async def before(kill: bool) -> tuple[str, float]:
        async with kept(url) as (_, jobs):
            job = await jobs.open("job")
            job.owner.post(AgentJoined(AgentId("node", "1"), JobSpec("job"), _FACTS))
            seen = job.watch(0).queue
            while (note := await seen.get()) is None or note.kind != "sealed":
                pass
            job.remark(RestartTimes(1, fork_s=2.0), "node")
            if kill:
                stored = await jobs._store.values("job").wait(_PAST)
                while not decode_past(stored.data).restart_times:
                    stored = await jobs._store.values("job").wait(_PAST, stored.version)
                jobs._unsaved.clear()  # and so the end is not written
            return job.journal_id, job.began_at

    async def after(journal: str, began_at: float) -> None:
        async with kept(url) as (_, jobs):
            job = await jobs.open("job")
            assert [note.kind for note in job.notes][:1] == ["joined"]
            assert [note.kind for note in job.notes][-1:] == ["resumed"]
            assert job.restart_times[1, "node"].fork_s == 2.0
            assert (job.journal_id, job.began_at) == (journal, began_at)
            assert len({note.seq for note in job.notes}) == len(job.notes)
            (listed,), _ = await jobs.listed()
            assert listed.began_at == began_at

    for kill in (True, False):
        journal, began_at = soon(before(kill))
        soon(after(journal, began_at))
        for file in tmp_path.iterdir():
            file.unlink()


def test_a_job_that_cannot_be_read_does_not_keep_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with kept(f"file:{tmp_path}/jobs") as (store, jobs):
            for job_id in ("a-damaged", "over"):
                await store.job(job_id).save(_ENDED, 0)
            with sqlite3.connect(tmp_path / "jobs") as database:
                database.execute("UPDATE jobs SET state = x'00' WHERE job = 'a-damaged'")
            database.close()
            await jobs.delete_old(1000.0, 1000.0)
            await jobs.delete_old(1001.0 + _HISTORY_S, 1001.0 + _HISTORY_S)
            assert list(await store.jobs()) == ["a-damaged"]

    soon(story())


def test_a_job_whose_scripts_filled_its_values_is_forgotten_all_the_same() -> None:
    async def story() -> None:
        async with kept("memory") as (store, jobs):
            await store.job("full").save(_ENDED, 0)
            for i in range(KEYS_PER_JOB):
                await store.values("full").put(f"{i}", b"")
            await jobs.delete_old(1000.0, 1000.0)
            await jobs.delete_old(1001.0 + _HISTORY_S, 1001.0 + _HISTORY_S)
            assert list(await store.jobs()) == []

    soon(story())


@pytest.mark.parametrize("one_tenant", [True, False])
def test_nodes_that_wait_in_two_jobs_learn_of_each_other_once(
    one_tenant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_LOOK_AFTER_S", 0.02)

    async def story() -> None:
        store = await open_store("memory")
        jobs = Jobs(
            store, ServiceLimits(), Metrics(), history_s=1.0, resume_grace_s=1.0, one_tenant=one_tenant
        )
        told: dict[str, list[str]] = {"a": [], "b": []}
        both = asyncio.Event()

        def note(job_id: str, text: str) -> None:
            told[job_id].append(text)
            if all(told.values()):
                both.set()

        for job_id in "ab":
            job = await jobs.open(job_id)
            monkeypatch.setattr(job, "notify", partial(note, job_id))
            await job.execute(AgentJoined(AgentId("node", "1"), JobSpec(job_id, 2, 2), _FACTS))
        if one_tenant:  # without a turn of the maintenance
            await both.wait()
        for _ in range(5):
            jobs.mention_waiting_jobs()
        await jobs.close(0.0)
        await store.close()
        assert [len(told["a"]), len(told["b"])] == [one_tenant, one_tenant]

    soon(story())
