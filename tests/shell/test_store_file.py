"""The store in one file: crashes, a second process, files that are none of ours, a full disk."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rendezvous.store.file import open_file_store
from rendezvous.store.open import open_store
from rendezvous.store.protocol import Conflict, StoreError
from rendezvous.values.job_state import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITER = Path(__file__).parent / "programs" / "file_writer.py"


@pytest.mark.timeout(600)  # it writes to the disk a thousand times and more
@pytest.mark.parametrize(
    ("times", "nodes"), [(10, 0), (4, 300), pytest.param(50, 0, marks=pytest.mark.nightly)]
)
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, times: int, nodes: int) -> None:
    """So many times, at any moment: during a write, a checkpoint of the log, or the opening itself.

    A job of many nodes is stored as a snapshot and the changes since then. Each write has one node's; the members tell
    whether the two fit together.
    """
    path = str(tmp_path / "s.db")
    lucky, last = random.Random(5), (0, 0, 0)
    for _ in range(times):
        acknowledged = _write_until_killed(path, lucky.randrange(1, 60), nodes)
        last = acknowledged or last
        found = asyncio.run(_reread(path, nodes))
        assert found[0] >= last[0]
        assert found[1] >= last[1]
        assert found[2] >= last[2]
        with sqlite3.connect(path) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()
    assert last[0] > 10 * times


def _write_until_killed(path: str, after_writes: int, nodes: int) -> tuple[int, int, int] | None:
    with subprocess.Popen(
        [sys.executable, "-S", str(_WRITER), path, str(nodes)], stdout=subprocess.PIPE, env=_env()
    ) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(after_writes)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()  # said before it died
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole:
        return None
    generation, version, value = map(int, whole[-1].split())
    return generation, version, value


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


async def _reread(path: str, nodes: int = 0) -> tuple[int, int, int]:
    store = await open_file_store(path)
    try:
        state, version = await store.job("j").load()
        if nodes and version:  # the latest write to each node is there
            arrivals = {m.arrival for m in state.members.values()}
            assert len(state.members) == nodes
            assert arrivals >= set(range(max(2, state.generation - nodes + 1), state.generation + 1))
        value = await store.values("j").get("k")
        return state.generation, version, value.version if value else 0
    finally:
        await store.close()


def test_a_restart_takes_up_all_jobs(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/s.db"

    async def write() -> list[int]:
        store = await open_store(url)
        versions = [await store.job(f"j{i}").save(JobState(generation=i), 0) for i in range(20)]
        await store.close()
        return versions

    async def read() -> None:
        store = await open_store(url)
        assert list(await store.jobs()) == sorted(f"j{i}" for i in range(20))
        for i, version in enumerate(versions):
            assert await store.job(f"j{i}").load() == (JobState(generation=i), version)
        await store.close()

    versions = asyncio.run(write())
    asyncio.run(read())


def test_a_second_process_is_told_who_has_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    with subprocess.Popen(
        [sys.executable, "-S", str(_WRITER), path], stdout=subprocess.PIPE, env=_env()
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(StoreError, match=rf"s\.db\.lock is locked by process {writer.pid}\b"):
            asyncio.run(open_file_store(path))
        writer.kill()
    asyncio.run(_reread(path))


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    asyncio.run(_reread(str(tmp_path / "s.db")))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_files_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, and much too long to be mistaken for an empty one" * 20)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    later = tmp_path / "later.db"
    asyncio.run(_reread(str(later)))
    with sqlite3.connect(later) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    for path, complaint in (
        (text, "not a database"),
        (other, "another program"),
        (later, "layout 99"),
        (tmp_path / "no" / "folder", "No such file"),
        (tmp_path, "unable to open|Is a directory"),
    ):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(StoreError, match=complaint):
            asyncio.run(open_file_store(str(path)))
        assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_damaged_job_is_refused_in_words(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")

    async def write() -> None:
        store = await open_file_store(path)
        await store.job("j").save(JobState(), 0)
        await store.close()

    async def read() -> None:
        store = await open_file_store(path)
        try:
            with pytest.raises(StoreError, match="stored state of job 'j'"):
                await store.job("j").load()
        finally:
            await store.close()

    asyncio.run(write())
    with sqlite3.connect(path) as database:
        database.execute("UPDATE jobs SET state = x'00112233'")
    database.close()
    asyncio.run(read())


class _Telling(logging.Handler):
    def __init__(self, tell: Callable[[], object]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell()


def test_a_full_disk_makes_writers_wait_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit on the size of a file stands for the disk: SQLite gets an error from its write all the same."""
    caplog.set_level(logging.WARNING)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def check() -> None:
        store = await open_file_store(str(tmp_path / "s.db"))
        first = await store.job("j").save(JobState(generation=1), 0)
        loop, said = asyncio.get_running_loop(), asyncio.Event()
        telling = _Telling(lambda: loop.call_soon_threadsafe(said.set))
        logging.getLogger("rendezvous.store.file").addHandler(telling)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            saving = asyncio.create_task(store.job("j").save(JobState(generation=2), first))
            async with asyncio.timeout(60.0):
                await said.wait()
            assert not saving.done()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            logging.getLogger("rendezvous.store.file").removeHandler(telling)
        async with asyncio.timeout(60.0):
            second = await saving
        assert await store.job("j").load() == (JobState(generation=2), second)
        await store.close()

    asyncio.run(check())
    said = [r.levelname for r in caplog.records if r.name == "rendezvous.store.file"]
    assert said == ["ERROR", "WARNING"]  # once, and once that it is over


def test_what_was_asked_for_is_done_in_order_and_before_closing(tmp_path: Path) -> None:
    async def check() -> None:
        store = await open_file_store(str(tmp_path / "s.db"))
        values = store.values("j")
        puts = [asyncio.create_task(values.put("k", str(i).encode())) for i in range(1000)]
        dropped = asyncio.create_task(store.job("j").save(JobState(), 5))
        await asyncio.sleep(0)
        dropped.cancel()
        await store.close()
        versions = [await put for put in puts]
        assert versions == sorted(versions)
        with pytest.raises(StoreError, match="closed"):
            await values.get("k")
        again = await open_file_store(str(tmp_path / "s.db"))
        last = await again.values("j").get("k")
        assert last is not None
        assert last.data == b"999"
        with pytest.raises(Conflict):
            await again.job("j").save(JobState(), 5)
        await again.close()

    asyncio.run(check())


def test_the_event_loop_goes_on_while_the_disk_works(tmp_path: Path) -> None:
    """Somebody else's lock on the database stands for a slow disk. A loop that waits for it does so each time; one
    that is merely kept from running is not, three times running."""

    async def longest_turn() -> float:
        loop = asyncio.get_running_loop()
        longest, before = 0.0, loop.time()
        for _ in range(100):
            await asyncio.sleep(0.002)
            longest, before = max(longest, loop.time() - before), loop.time()
        return longest

    async def check() -> None:
        path = str(tmp_path / "s.db")
        store = await open_file_store(path)
        version, turns = await store.job("j").save(JobState(), 0), []
        blocker = sqlite3.connect(path, isolation_level=None)
        for generation in (1, 2, 3):
            blocker.execute("BEGIN IMMEDIATE")
            saving = asyncio.create_task(store.job("j").save(JobState(generation=generation), version))
            turns.append(await longest_turn())
            assert not saving.done()
            blocker.execute("ROLLBACK")
            async with asyncio.timeout(60.0):
                version = await saving
        blocker.close()
        assert min(turns) < 0.2
        await store.close()

    asyncio.run(check())
