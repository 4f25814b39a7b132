"""How many files a resume opens: 256 ranks, and a folder with three commits of 256 shards."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddp.elastic import commits, resume
from ddp.elastic.files import folders as folder_module
from ddp.elastic.files import manifest
from ddp.elastic.files.folders import LocalFolder, RemoteFolder
from ddp.elastic.files.part_file import FileEncoder
from ddp.elastic.images import image, leaves

if TYPE_CHECKING:
    from pathlib import Path

    from ddp.elastic.files.folders import Folder

WORLD = 256
NUMBERS = (100, 200, 300)


def part(number: int, rank: int) -> image.Image:
    """A shard of one element, and on the first rank a replicated tensor."""
    shard = leaves.Leaf("objects.model.w", torch.float32, (WORLD,), (1,), ((rank, 1),), sharded=True)
    whole = leaves.Leaf("fields.x", torch.float32, (2,), (1,), ((0, 2),), sharded=False)
    layout = image.ImageLayout.of([shard, whole], [True, rank == 0])
    skeleton = image.serialize(
        {"objects": image.serialize({"model": {"w": "\0tensor 0"}}), "fields": {"x": "\0tensor 1"}}
    )
    head = image.ImageHead(number, "abc", rank, WORLD, rank, WORLD, regions=rank)
    index = image.index_of(head, skeleton, image.serialize({}), layout.pack(), layout.n_bytes)
    buffer = memoryview(bytearray(index.n_bytes))
    image.view(buffer[index.data_at :], shard, 0).fill_(number + rank)
    if rank == 0:
        image.view(buffer[index.data_at :], whole, layout.offsets[1]).fill_(number)
    image.begin(buffer)
    image.finish(buffer, index)
    return image.Image(buffer)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commits")
    folder = LocalFolder(path)
    encoder, maker = FileEncoder(), manifest.Maker()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder_module, "_sync", lambda _path: None)
        patched.setattr(folder_module, "os", type("os", (), vars(os) | {"fsync": lambda _fd: None}))
        for number in NUMBERS:
            for rank in range(WORLD):
                name = commits.DiskName(commits.CommitName(number, "abc"), rank, WORLD)
                content = list(encoder.encode(part(number, rank), {}))
                folder.write(commits.file_name(name), lambda content=content: content)
            manifest.complete(folder, maker, name)
    return path


class Threads:
    """The collectives of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size


class Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.size = threads, rank, threads.size

    def gather(self, value: Any) -> list[Any]:
        self._threads.values[self.rank] = value
        self._threads.barrier.wait()
        found = list(self._threads.values)
        self._threads.barrier.wait()
        return found

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def broadcast(self, data: memoryview | None, root: int) -> memoryview:
        return memoryview(bytearray(self.gather(data)[root]))


def resume_all(folder: Folder, world: int) -> dict[int, tuple[float, float]]:
    """What each rank has of the newest commit: its shard, or that of the same number, and the replicated tensor."""
    threads = Threads(world)
    found: dict[int, tuple[float, float]] = {}

    def run(rank: int) -> None:
        team: Any = Rank(threads, rank)
        local = resume.find_images(team, PLACES, folder)
        choice = resume.choose(team, local)
        assert choice is not None
        values: dict[str, float] = {}
        for each in resume.parts(team, local, choice, rank, regions=rank):
            for number, leaf in enumerate(each.layout.leaves):
                if (tensor := each.tensor(number)) is not None and (
                    not leaf.sharded or each.head.rank == rank
                ):
                    values[leaf.path] = float(tensor[0])
        found[rank] = (values["objects.model.w"], values["fields.x"])

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return found


PLACES: list[Any] = []


@pytest.fixture(autouse=True)
def no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_opens.PLACES", [tmp_path / "none"])


def test_a_local_folder(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(filled)
    read = LocalFolder.read
    opened: Counter[str] = Counter()
    monkeypatch.setattr(LocalFolder, "read", lambda self, file: opened.update([file]) or read(self, file))
    world = 16
    assert resume_all(folder, world) == {rank: (300 + rank, 300) for rank in range(world)}
    assert set(opened) >= {f"commit-0000000300-abc/part-{each}-of-{WORLD}.distcp" for each in range(WORLD)}
    assert sum(opened.values()) <= WORLD + 2 * world, (
        "each part is verified by one rank, and used by one or by all"
    )
    assert all("commit-0000000300" in file for file in opened)


@pytest.mark.parametrize("world", [pytest.param(WORLD, marks=pytest.mark.nightly), 5])
def test_an_object_store(filled: Path, world: int) -> None:
    """Each object is read once by the whole job, and rank 0 alone lists them, with one request."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.store.clear()
    folder = RemoteFolder("memory://run")
    for each in filled.glob("*/*"):
        store.pipe(f"/run/{each.relative_to(filled)}", each.read_bytes())
    calls: Counter[str] = Counter()
    objects: Counter[str] = Counter()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            def call(*words: Any, **options: Any) -> Any:
                calls[name] += 1
                if name == "cat_ranges":
                    objects.update(set(words[0]))
                return getattr(store, name)(*words, **options)

            return call

    folder._fs = Counting()
    expected = {rank: (300.0 + rank, 300.0) for rank in range(world)}
    assert resume_all(folder, world) == expected
    assert calls.pop("find") == 1
    assert set(calls) == {"invalidate_cache", "info", "cat_ranges"}
    assert len(objects) == WORLD
    assert set(objects.values()) == {1}


def test_a_manifest_of_256_parts_is_one_small_file(filled: Path) -> None:
    folder = LocalFolder(filled)
    path = f"{commits.folder_name(commits.CommitName(300, 'abc'))}/{commits.MANIFEST}"
    read = manifest.read(bytes(folder.read(path)))
    assert read.facts is not None
    assert (read.facts.number, len(read.facts.bytes_of_parts)) == (300, WORLD)
    table = read.table()
    assert len(table.tensors["model.w"].chunks) == WORLD
    assert json.dumps(table.paths) == json.dumps({"model.w": ["model", "w"], "x": ["x"]})


def test_survivors_tell_the_launcher_which_steps_they_take_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    page = type("Page", (), {"repeats": lambda _self, steps: told.append(steps)})()
    monkeypatch.setattr(resume.status_page, "page", lambda: page)
    choice = commits.CommitChoice(commits.CommitName(7, "abc"), ())
    resume.check_survivors((commits.Position("a", 9, 9, 7), None), choice, 0)
    resume.check_survivors((None, None), choice, 0)  # a plain restart: the agent knows what is repeated
    assert told == [3]


@pytest.mark.parametrize(
    ("in_shards", "said"),
    [(False, "no rank has a whole state of the training"), (True, "a shard of the state is lost")],
)
def test_survivors_without_a_state_to_go_on_from_say_what_is_missing(in_shards: bool, said: str) -> None:
    with pytest.raises(resume.CannotReform, match=said):
        resume.check_survivors((commits.Position("a", 9, None, None), None), None, 0, in_shards)
