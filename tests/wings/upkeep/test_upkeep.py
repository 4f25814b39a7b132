"""Backups are restored into either kind of store while agents wait, and doctor names what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from authority import Authority
from etcd_cluster import needs_etcd, running
from served import Agent, Service, agents, soon

from rendezvous.access.auth import add_key
from rendezvous.main import main
from rendezvous.store.open import open_store
from rendezvous.values.events import AgentStopped, Ended, RankFailed, RanksFinished, Stop
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import Cause, FailureClass, JobSpec, Outcome, RestartBudget

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENDED = JobState(spec=JobSpec("job"), phase=Phase.ENDED, outcome=Outcome(True, "all ranks finished", 0))
_SPEC = JobSpec("job", budget=RestartBudget(3))


@pytest.fixture(scope="module")
def etcd_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("etcd"), n=1) as cluster:
        yield cluster.hosts


def done(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


async def fail(agent: Agent, generation: int) -> int:
    """One restart: the next generation."""
    cause = Cause("a", 0, 0, FailureClass.SIGNAL, "killed by SIGBUS", 135, ran_s=60.0)
    agent.session.send(RankFailed(agent.id, generation, cause))
    await agent.expect(Stop)
    agent.session.send(AgentStopped(agent.id, generation))
    return await agent.run()


@pytest.mark.parametrize("is_old", [False, True])
def test_a_job_that_runs_goes_on_after_a_restore(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_old: bool
) -> None:
    """Also from a backup that was made before its last restart: nobody is told of a generation twice."""
    store, backup, restored = (str(tmp_path / name) for name in ("store", "backup", "restored"))

    async def story(service: Service) -> None:
        async with agents(service.endpoint, _SPEC, ["a"]) as (a,):
            generation = await fail(a, await a.run())
            assert done(capsys, "backup", "--store", f"file:{store}", backup)[0] == 0
            if is_old:
                generation = await fail(a, generation)
            service.end(signal.SIGKILL)
            code, words = done(capsys, "restore", "--store", f"file:{restored}", backup)
            assert (code, "restored 1 jobs" in words) == (0, True), words
            again = Service("--listen", service.endpoint, "--store", f"file:{restored}")
            try:
                again.await_endpoint()
                later = await fail(a, generation)
                assert later > generation
                a.session.send(RanksFinished(a.id, later))
                assert (await a.expect(Ended)).outcome.succeeded
            finally:
                again.close()

    service = Service("--listen", "127.0.0.1:0", "--store", f"file:{store}")
    try:
        service.await_endpoint()
        soon(story(service))
    finally:
        service.close()


def test_what_cannot_be_restored_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, backup = str(tmp_path / "store"), str(tmp_path / "backup")

    async def fill() -> None:
        opened = await open_store(f"file:{store}")
        await opened.job("job").save(_ENDED, 0)
        await opened.values("job").put("key", b"value")
        code, words = done(capsys, "restore", "--store", f"file:{store}", store)
        assert (code, "is locked by process" in words) == (1, True), words
        await opened.close()

    soon(fill())
    assert done(capsys, "backup", "--store", f"file:{store}", backup)[0] == 0
    for words, said in (
        (("backup", "--store", f"file:{store}", backup), "exists"),
        (("restore", "--store", f"file:{store}", backup), "exists"),
        (("restore", "--store", "file:new", str(tmp_path / "nothing")), "does not exist"),
        (("restore", "--store", "memory", backup), "--store is missing"),
        (("backup", "--store", f"file:{store}", str(tmp_path / "no" / "folder")), "No such file"),
    ):
        code, shown = done(capsys, *words)
        assert (code, said in shown, "DDP-" in shown) == (1, True, True), shown
    other = tmp_path / "other"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE theirs (a)")
    database.close()
    data = bytearray(Path(backup).read_bytes())
    data[4096:8192] = b"\xff" * 4096
    Path(backup).write_bytes(bytes(data))
    for path in (str(other), backup):
        new = str(tmp_path / "new")
        code, shown = done(capsys, "restore", "--store", f"file:{new}", path)
        assert code == 1, shown
        assert not os.path.exists(new)


@needs_etcd
def test_a_backup_moves_a_service_from_a_file_to_etcd_and_back(
    etcd_hosts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: str(tmp_path / name) for name in ("store", "first", "second", "back")}
    etcd = f"etcd://{etcd_hosts}/moved"

    async def fill(url: str) -> None:
        store = await open_store(url)
        for i in range(300):
            await store.job(f"job/{i:03} %").save(_ENDED, 0)
        for i in range(30):
            await store.values("job/001 %").put(f"key/{i}", bytes([i]) * 60_000)
        await store.close()

    async def check(url: str) -> None:
        store = await open_store(url)
        assert len(await store.jobs()) == 300
        state, version = await store.job("job/007 %").load()
        assert (state, version > 0) == (_ENDED, True)
        held = await store.values("job/001 %").get("key/29")
        assert held is not None
        assert held.data == bytes([29]) * 60_000
        assert await store.values("job/001 %").put("key/29", held.data) > held.version
        await store.close()

    url = f"file:{paths['store']}"
    soon(fill(url))
    assert done(capsys, "backup", "--store", url, paths["first"])[0] == 0
    assert done(capsys, "restore", "--store", etcd, paths["first"])[0] == 0
    soon(check(etcd))
    code, shown = done(capsys, "restore", "--store", etcd, paths["first"])
    keys = 300 + 30 + 1  # jobs, values, and the mark of the last write of a value
    assert (code, f"already has {keys} keys" in shown) == (1, True), shown
    assert done(capsys, "backup", "--store", etcd, paths["second"])[0] == 0
    assert done(capsys, "restore", "--store", f"file:{paths['back']}", paths["second"])[0] == 0
    soon(check(f"file:{paths['back']}"))
    for store in (etcd, f"file:{paths['back']}"):
        code, shown = done(capsys, "compact", "--store", store)
        assert (code, "compacted: " in shown) == (0, True), shown
    before, after = (int(word.replace(",", "")) for word in shown.split() if word[0].isdigit())
    assert after <= before
    code, shown = done(capsys, "doctor", "--listen", "127.0.0.1:0", "--store", etcd)
    assert "ok       store: etcd 3." in shown
    assert "300 jobs" in shown


def test_doctor_names_each_problem_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, keys = tmp_path / "store", tmp_path / "keys"
    store.write_bytes(b"no database " * 1000)
    add_key(str(keys))
    keys.chmod(0o644)
    words = ["doctor", "--listen", "127.0.0.1:0", "--store", f"file:{store}", "--token-keys", str(keys)]
    code, shown = done(capsys, *words)
    assert code == 1
    assert "problem  store: " in shown
    assert "problem  keys: other users can read" in shown
    store.unlink()
    keys.chmod(0o600)
    _, shown = done(capsys, *words)
    assert "ok       store: " in shown
    assert "ok       keys: " in shown
    assert "1 key\n" in shown
    code, shown = done(capsys, "doctor", "--listen", "nonsense")
    assert (code, "problem  settings: invalid address" in shown) == (1, True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_doctor_sees_certificates_that_end_soon_or_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("server", days=3)
    other = authority.issue("other", days=90)
    words = ["doctor", "--listen", "127.0.0.1:0", "--tls-cert"]
    _, shown = done(capsys, *words, certificate, "--tls-key", key)
    assert f"problem  certificates: {certificate} (tls_cert) is valid for 3.0 days" in shown
    _, shown = done(capsys, *words, other[0], "--tls-key", other[1])
    assert f"ok       certificates: {other[0]} (tls_cert) is valid for 90.0 days" in shown
    _, shown = done(capsys, *words, other[0], "--tls-key", key)
    assert "problem  certificates: the key in" in shown
