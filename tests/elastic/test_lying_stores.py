"""Object stores that lie: never a wrong state, never a lost whole commit, and the training goes on."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("fsspec", reason="fsspec is in requirements/test.txt")

from lying_store import KINDS, LyingStore, World

from ddp import elastic
from ddp.elastic import commits
from ddp.elastic.files import folders, manifest, part_file, writer

if TYPE_CHECKING:
    from pathlib import Path

URL = "lying://run"
N_STEPS = 8
KEPT = 3


class Clock:
    """Stands still but for those who sleep: how slow the machine is does not decide what was waited for."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        with self._lock:
            return self._now_s

    def sleep(self, duration_s: float) -> None:
        with self._lock:
            self._now_s += duration_s


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    clock = Clock()
    monkeypatch.setattr(folders, "time", clock)
    monkeypatch.setattr(manifest, "time", clock)
    monkeypatch.setattr(folders, "_FIRST_PAUSE_S", 0.0005)
    monkeypatch.setattr(folders, "_LONGEST_PAUSE_S", 0.001)
    monkeypatch.setattr(folders, "_STALE_S", 0.1)
    monkeypatch.setattr(manifest, "_PAUSE_S", 0.001)


def tell(monkeypatch: pytest.MonkeyPatch, world: World) -> World:
    monkeypatch.setattr(LyingStore, "world", world)
    return world


def begun(**options: Any) -> elastic.State:
    return elastic.State(x=torch.zeros(300), notes=["begun"], step=0, folder=URL, **options)


def train(until: int = N_STEPS) -> None:
    """Go on from what is there, as a new process does."""
    state = begun(disk_every=1, keep=KEPT)
    state.resume()
    first = state.step + 1
    for state.step in range(first, until + 1):
        state.x.fill_(state.step)
        state.notes.append(f"step {state.step}")
        state.commit()
        state.flush()
    state.close()


def resumed() -> int:
    state = begun()
    found = state.resume()
    state.close()
    if found is None:
        return 0
    assert not found.in_memory
    assert state.x.unique().tolist() == [found.number] == [state.step]
    assert state.notes == ["begun", *(f"step {step}" for step in range(1, state.step + 1))]
    return state.step


def kept(world: World, ends_with: str) -> list[int]:
    return sorted(int(path.split("-")[1]) for path in world.objects if path.endswith(ends_with))


@pytest.mark.parametrize("seed", range(12))
def test_no_lie_loses_a_commit_or_gives_a_wrong_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = KINDS | {
        "stale listing": 0
    }  # a listing is checked apart: a commit that nobody can see is not found
    world = tell(monkeypatch, World(seed, kinds))
    for until in (3, N_STEPS):  # two processes
        train(until)
        assert resumed() == until
    assert sum(world.told.values()) > 10  # how many depends on what is read in parallel
    assert kept(world, ".distcp") == list(range(N_STEPS - KEPT + 1, N_STEPS + 1))
    assert kept(world, ".metadata") == kept(world, ".distcp")
    check_manifests(world)


def check_manifests(world: World) -> None:
    for path, data in world.objects.items():
        if path.endswith(".metadata"):
            facts = manifest.read(data).facts
            assert facts is not None
            part = path.replace(".metadata", "part-0-of-1.distcp")
            assert facts.bytes_of_parts == (len(world.objects[part]),)
            pickle.loads(data)  # what torch.distributed.checkpoint does


@pytest.mark.parametrize("seed", range(6))
def test_stale_listings_leave_no_commit_without_a_manifest_for_good(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tell(monkeypatch, World(seed, {"stale listing": 600}, patience=6))
    train()
    assert world.told["stale listing"] > 3
    assert N_STEPS in kept(world, ".distcp")
    world = tell_truth(monkeypatch, world)
    assert resumed() == N_STEPS
    train(N_STEPS + 1)  # its prune adds what is missing
    assert kept(world, ".metadata")[-KEPT:] == list(range(N_STEPS + 2 - KEPT, N_STEPS + 2))
    check_manifests(world)


def tell_truth(monkeypatch: pytest.MonkeyPatch, before: World) -> World:
    world = tell(monkeypatch, World())
    world.objects = before.objects
    return world


def test_a_body_that_is_too_short_is_asked_for_again_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = tell(monkeypatch, World(1, {"truncated body": 1000}, patience=2))
    world.objects["run/x"] = b"12345"
    there = folders.RemoteFolder(URL)
    assert there.read_ranges([("x", 1, 3)]) == [b"234"]
    assert "of 3 bytes at 1 of x" in caplog.text
    world = tell(monkeypatch, World(1, {"truncated body": 1000}, patience=10**9))
    world.objects["run/x"] = b"12345"
    monkeypatch.setattr(folders, "PATIENCE_S", 0.01)
    with pytest.raises(OSError, match=r"the store sent [012] of 3 bytes at 1 of x"):
        there.read_ranges([("x", 1, 3)])


def test_a_store_that_never_sends_all_does_not_make_a_job_begin_from_an_older_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = tell(monkeypatch, World())
    train(2)
    lying = tell(monkeypatch, World(1, {"truncated body": 1000}, patience=10**9))
    lying.objects = world.objects
    monkeypatch.setattr(folders, "PATIENCE_S", 0.01)
    with pytest.raises(elastic.CommitError, match=r"cannot read .*part-0-of-1\.distcp: .*the store sent"):
        begun().resume()


def test_an_upload_that_is_not_seen_at_once_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = tell(monkeypatch, World(1, {"unseen object": 1000}, patience=20))
    folders.RemoteFolder(URL).write("x", lambda: [b"12345"])
    assert (world.objects, world.told["unseen object"]) == ({"run/x": b"12345"}, 20)
    assert "cannot find x in lying://run, trying again" in caplog.text


def test_an_upload_that_the_store_has_lost_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "_STALE_S", 0.005)
    world = tell(monkeypatch, World(1, {"swallowed upload": 1000}, patience=3))
    folders.RemoteFolder(URL).write("x", lambda: [b"12345"])
    assert (world.objects, world.told["swallowed upload"]) == ({"run/x": b"12345"}, 3)
    assert "the store took all of it, but does not have it" in caplog.text


def test_an_object_that_is_not_there_ends_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_STALE_S", 0.005)
    tell(monkeypatch, World())
    with pytest.raises(FileNotFoundError):
        folders.RemoteFolder(URL).read("x")


class NoCredentialsError(Exception):
    """As botocore calls it."""


def test_missing_credentials_are_not_waited_for_as_long_as_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_STALE_S", 0.005)
    tell(monkeypatch, World())

    def find(*_words: Any, **_options: Any) -> dict[str, dict[str, Any]]:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(LyingStore, "find", find)
    with pytest.raises(
        elastic.CommitError, match=r"cannot list the commits .*NoCredentialsError: Unable to locate"
    ):
        begun().resume()


def test_a_flipped_bit_on_the_way_is_read_again_and_one_in_the_store_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = tell(monkeypatch, World())
    train(2)
    lying = tell(monkeypatch, World(3, {"flipped bit": 1000}, patience=part_file._READS - 1))
    lying.objects = world.objects
    assert resumed() == 2
    assert lying.told["flipped bit"] == part_file._READS - 1
    tell_truth(monkeypatch, lying)
    newest = max(path for path in world.objects if path.endswith(".distcp"))
    data = bytearray(world.objects[newest])
    data[len(data) // 3] ^= 1
    world.objects[newest] = bytes(data)
    assert resumed() == 1
    assert newest.removeprefix("run/") in caplog.text


def test_a_listing_with_a_manifest_and_without_its_parts_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = tell(monkeypatch, World())
    train(2)
    newest = max(path for path in world.objects if path.endswith(".distcp"))
    honest, asked = LyingStore.find, []

    def find(self: LyingStore, path: str, *args: Any, **options: Any) -> dict[str, dict[str, Any]]:
        asked.append(path)
        found = honest(self, path, *args, **options)
        return found if len(asked) > 1 else {name: facts for name, facts in found.items() if name != newest}

    monkeypatch.setattr(LyingStore, "find", find)
    assert resumed() == 2
    assert len(asked) == 2


def test_a_commit_that_no_listing_shows_is_passed_over_and_not_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = tell(monkeypatch, World())
    train(2)
    honest = LyingStore.find

    def find(self: LyingStore, path: str, *args: Any, **options: Any) -> dict[str, dict[str, Any]]:
        found = honest(self, path, *args, **options)
        return {name: facts for name, facts in found.items() if "commit-0000000002" not in name}

    monkeypatch.setattr(LyingStore, "find", find)
    assert resumed() == 1
    monkeypatch.setattr(LyingStore, "find", honest)
    assert resumed() == 2
    assert kept(world, ".distcp") == [1, 2]


def test_a_manifest_that_cannot_be_made_does_not_stop_newer_commits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = tell(monkeypatch, World())
    train(1)
    (gone,) = [path for path in world.objects if path.endswith(".metadata")]
    del world.objects[gone]
    (part,) = world.objects
    world.objects[part] = world.objects[part][:-1]  # damaged, so it has no index
    state = begun(disk_every=1, keep=KEPT)
    state._writer = writer.Writer(folders.RemoteFolder(URL), KEPT, True, "a", commits.CommitName(9, "a"))
    state._writer._prune(commits.CommitName(2, "a"))
    state._writer._prune(commits.CommitName(3, "a"))
    assert caplog.text.count("commit 1 in lying://run stays without a manifest") == 1


def test_empty_folders_of_older_commits_are_removed(tmp_path: Path) -> None:
    """A process that is killed right after it made the folder of a commit leaves one."""
    there = tmp_path / "commits"
    (there / "commit-0000000001-dead").mkdir(parents=True)
    (there / "commit-0000000009-dead").mkdir()  # newer: another rank may be about to write there
    (there / "mine").mkdir()
    state = elastic.State(x=torch.zeros(3), step=0, folder=there, disk_every=1, keep=2)
    state.resume()
    for state.step in (1, 2, 3):
        state.commit()
    state.close()
    names = sorted(path.name.split("-")[1] if "-" in path.name else path.name for path in there.iterdir())
    assert names == ["0000000002", "0000000003", "0000000009", "mine"]
