"""Rounds in which commits are protected, and the computation of lost images: ranks as threads of this process."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ddp.elastic.commits import ReadableImage
from ddp.elastic.images import image, kept_images
from ddp.elastic.resume import LocalImages
from ddp_launch_wings.redundancy import parity, protection
from ddp_launch_wings.redundancy.parity import ParityStore
from ddp_launch_wings.redundancy.peer_links import Links, Peer, PeerError, Server
from ddp_launch_wings.redundancy.placement import Code, Place, chunk_bytes, layout
from ddp_launch_wings.redundancy.protection import Leader, Protector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LINEAGE = "abc"
_WITHIN_S = 60.0


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@dataclass
class Rank:
    number: int
    size: int
    place: Path
    slots: kept_images.Slots
    protector: Protector
    images: dict[int, bytes] = field(default_factory=dict)

    def commit(self, number: int) -> None:
        head = image.ImageHead(number, LINEAGE, self.number, self.size, self.number, self.size, 0)
        data = random.Random(number * 1000 + self.number).randbytes(200_000 + 7_000 * self.number)
        index = image.index_of(
            head, b"skeleton", b"private", image.ImageLayout((), (), len(data)).pack(), len(data)
        )
        slot = self.slots.next(index.n_bytes)
        image.begin(slot.buffer)
        slot.buffer[index.data_at : index.n_bytes] = data
        image.finish(slot.buffer, index)
        self.slots.keep(slot)
        self.images[number] = bytes(slot.buffer[: index.n_bytes])
        self.protector.committed(number, slot)

    def files(self, kind: str) -> list[Path]:
        return sorted(self.place.glob(f"{kind}*"))


class Ranks(list[Rank]):
    def commit(self, number: int) -> None:
        for rank in self:
            rank.commit(number)

    def wait_for(self, number: int) -> None:
        eventually(lambda: all(rank.protector.protected == number for rank in self))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int, Code], Ranks]]:
    ranks = Ranks()

    numbers = itertools.count()

    def started(size: int, code: Code) -> Ranks:
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        stripes = layout([Place(f"n{number}") for number in range(size)], code)
        servers = [Server() for _ in range(size)]
        ports = [(each.port.address, each.port.number, each.port.secret) for each in servers]
        for number, server in enumerate(servers):
            place = folder / f"node{number}"
            slots = kept_images.Slots([place], 0, 4)
            links = Links(number, server, ports)
            protector = Protector(links, stripes, slots, ParityStore([place], LINEAGE), LINEAGE)
            ranks.append(Rank(number, size, place, slots, protector))
            protector.start()
        Leader(ranks[0].protector).start()
        return ranks

    yield started
    for rank in ranks:
        rank.protector.stop()
    names = ("ddp-parity", "ddp-protect")
    eventually(lambda: not any(each.name in names for each in threading.enumerate()))


# --- a resume ----------------------------------------------------------------------------------------


class Team:
    """The collectives of ranks that are threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._values = rank, size, barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(_WITHIN_S)
        found = list(self._values)
        self._barrier.wait(_WITHIN_S)
        return found


def resume(ranks: Ranks) -> list[LocalImages]:
    """What each rank has after the images of lost ones were computed."""
    size = len(ranks)
    barrier, values = threading.Barrier(size), [None] * size

    def one(rank: Rank) -> LocalImages:
        team: Any = Team(rank.number, size, barrier, values)
        local = LocalImages({}, {}, [], None)
        for path in kept_images.slots_in([rank.place]):
            found = image.Image(memoryview(kept_images.map_for_reading(path)))
            key = f"{path}#{found.index_sum}"
            local.images[key], local.paths[key] = found, str(path)
            at = (found.commit, found.head.part, size, found.head.rank, size)
            local.held.append(ReadableImage(*at, key, in_memory=True))
        links = Links.open(team)
        protection.rebuild(team, local, [rank.place], links)
        links.stop()
        return local

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, ranks))


def computed(found: LocalImages) -> dict[str, bytes]:
    return {key: bytes(each.whole) for key, each in found.images.items() if key.startswith("rebuilt/")}


def lose(ranks: Ranks, *numbers: int) -> None:
    for rank in ranks:
        rank.protector.stop()
    for number in numbers:
        shutil.rmtree(ranks[number].place)


def flip(path: Path, needle: bytes) -> None:
    """One bit of a file, in the middle of these bytes."""
    data = bytearray(path.read_bytes())
    data[data.index(needle) + len(needle) // 2] ^= 4
    path.write_bytes(data)


def test_the_images_of_lost_nodes_are_computed(start: Callable[[int, Code], Ranks]) -> None:
    ranks = start(6, Code(3, 2))
    ranks.commit(1)
    ranks.wait_for(1)
    ranks.commit(2)
    ranks.wait_for(2)
    ranks[0].commit(3)  # the others have not
    lose(ranks, 0, 4)
    found = resume(ranks)
    name = "rebuilt/commit-0000000002-abc/rank"
    assert [computed(each) for each in found] == [
        {f"{name}{number}": ranks[number].images[2]} if number in (0, 4) else {} for number in range(6)
    ]


def test_a_damaged_chunk_counts_as_lost(
    start: Callable[[int, Code], Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = start(5, Code(2, 2))
    ranks.commit(1)
    ranks.wait_for(1)
    lose(ranks, 0)
    (slot,) = ranks[1].files("local0.slot")
    flip(slot, ranks[1].images[1][-150_000:])  # in both of its chunks
    found = resume(ranks)
    assert computed(found[0]) == {"rebuilt/commit-0000000001-abc/rank0": ranks[0].images[1]}
    assert "ignored damaged or unreadable chunks of commits: commit-0000000001-abc/stripe" in caplog.text
    # Nobody uses the damaged image any more: it is computed as well.
    assert computed(found[1]) == {"rebuilt/commit-0000000001-abc/rank1": ranks[1].images[1]}
    assert not any(each.image.startswith(f"{slot}#") for each in found[1].held)


@pytest.mark.parametrize(("n_damaged", "is_computed"), [(1, True), (2, False)])
def test_damaged_parity_counts_as_lost(
    start: Callable[[int, Code], Ranks], n_damaged: int, is_computed: bool
) -> None:
    ranks = start(5, Code(1, 2))  # each image is on two other nodes
    ranks.commit(1)
    ranks.wait_for(1)
    lose(ranks, 0)
    wanted = ranks[0].images[1]
    copies = [path for rank in ranks for path in rank.files("parity") if wanted in path.read_bytes()]
    assert len(copies) == 2
    for path in copies[:n_damaged]:
        flip(path, wanted)
    assert bool(computed(resume(ranks)[0])) is is_computed


def test_too_many_lost_nodes(start: Callable[[int, Code], Ranks]) -> None:
    ranks = start(4, Code(3, 1))
    ranks.commit(1)
    ranks.wait_for(1)
    lose(ranks, 1, 2)
    assert not any(computed(each) for each in resume(ranks))


# --- rounds ------------------------------------------------------------------------------------------


def test_memory_is_that_of_two_commits_with_their_parity(start: Callable[[int, Code], Ranks]) -> None:
    ranks = start(4, Code(3, 1))
    for number in range(1, 8):
        ranks.commit(number)
        ranks.wait_for(number)
    for rank in ranks:
        assert len(rank.files("local0.slot")) == 2
        parity = [path.stat().st_size - 4096 for path in rank.files("parity")]  # less their facts
        largest = max(len(each.images[7]) for each in ranks)
        assert len(parity) == 2
        assert max(parity) <= chunk_bytes(largest, 3)
    for rank in ranks:
        rank.protector._store.remove()
        assert not rank.files("parity")


def test_a_round_that_fails_leaves_the_last_protected_commit(
    start: Callable[[int, Code], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "_LONGEST_PAUSE_S", 0.05)
    ranks = start(4, Code(2, 1))
    ranks.commit(1)
    ranks.wait_for(1)
    failed = threading.Event()
    real = parity.ParityStore.finish

    def finish(self: ParityStore, key: Any, number: int, *rest: Any) -> None:
        if number == 2 and key[0] == 3:
            failed.set()
            raise OSError(errno.EIO, "broken")
        real(self, key, number, *rest)

    monkeypatch.setattr(parity.ParityStore, "finish", finish)
    ranks.commit(2)
    assert failed.wait(_WITHIN_S)
    for number in (3, 4, 5):  # memory of commit 2 may be used again, but not that of commit 1
        for rank in ranks:
            if rank.number != 3:
                rank.commit(number)
    assert {rank.protector.protected for rank in ranks} == {1}
    lose(ranks, 3)
    found = resume(ranks)
    images = {f"rebuilt/commit-000000000{number}-abc/rank3": ranks[3].images[number] for number in (1, 2)}
    rebuilt = computed(found[3])
    assert rebuilt  # of commit 2 if enough of its parity was whole already: then commit 1 is not needed
    assert rebuilt.items() <= images.items()


def test_no_space_is_reported_and_tried_again(
    start: Callable[[int, Code], Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protection, "_LONGEST_PAUSE_S", 0.02)
    is_full = threading.Event()
    is_full.set()
    real = kept_images.new_file

    def new_file(places: list[Path], name: str, n_bytes: int) -> Any:
        if name.startswith("parity") and is_full.is_set():
            raise kept_images.ScratchError("no space for a commit of 1 MiB in /full")
        return real(places, name, n_bytes)

    monkeypatch.setattr(kept_images, "new_file", new_file)
    ranks = start(3, Code(2, 1))
    ranks.commit(1)
    words = "commit 1 is not protected against the loss of a node: rank 0: no space"
    eventually(lambda: words in caplog.text)
    is_full.clear()
    ranks.wait_for(1)


def test_a_commit_that_was_overwritten_is_missed_and_a_later_one_named(
    start: Callable[[int, Code], Ranks],
) -> None:
    ranks = start(3, Code(2, 1))
    for rank in ranks[1:]:
        rank.commit(1)
        rank.commit(2)
    ranks[0].commit(1)  # rank 0 names it, and the others have a newer one
    ranks[0].commit(2)
    numbers = itertools.count(3)

    def is_protected() -> bool:
        ranks.commit(next(numbers))
        for rank in ranks:
            rank.images.clear()
        return ranks[0].protector.protected is not None

    eventually(is_protected)
    protected = ranks[0].protector.protected
    assert protected is not None
    eventually(lambda: all((rank.protector.protected or 0) >= protected for rank in ranks))


# --- connections -------------------------------------------------------------------------------------


def test_the_newest_commit_is_protected_when_the_training_pauses(
    start: Callable[[int, Code], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a missed commit, the leader names one that is still to come."""

    def begin_ahead(leader: Leader) -> None:
        leader._ahead = 1
        begin(leader)

    begin = Leader.start
    monkeypatch.setattr(Leader, "start", begin_ahead)
    monkeypatch.setattr(protection, "_ANSWER_WITHIN_S", 0.05)
    ranks = start(3, Code(2, 1))
    ranks.commit(1)
    ranks.wait_for(1)


def test_bytes_that_were_overwritten_while_they_were_sent_are_refused(
    start: Callable[[int, Code], Ranks],
) -> None:
    ranks = start(3, Code(2, 1))
    ranks.commit(1)
    ranks.wait_for(1)
    peer = ranks[0].protector.links.peer(1)
    with pytest.raises(PeerError, match="rank 1: commit 7 is not held any more"):
        peer.ask({"do": "read", "number": 7, "begin": 0, "n_bytes": 5}, into=memoryview(bytearray(5)))
    with pytest.raises(PeerError, match="unknown request nonsense"):
        peer.ask({"do": "nonsense", "number": 1})
    protector = ranks[1].protector
    slot = protector._protected
    assert slot is not None
    protector._held = slot
    protector._is_held = lambda _number: False  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="rank 1 has overwritten this commit"):
        peer.ask({"do": "read", "number": 1, "begin": 0, "n_bytes": 5}, into=memoryview(bytearray(5)))
    peer.close()


def test_a_stranger_gets_nothing(start: Callable[[int, Code], Ranks]) -> None:
    ranks = start(3, Code(2, 1))
    address, number, _secret = ranks[0].protector.links.ports[1]
    stranger = Peer(1, (address, number), "00" * 16, 0)
    with pytest.raises(PeerError):
        stranger.ask({"do": "protected", "number": 1})
    with socket.create_connection((address, number)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = connection.recv(100)
        assert not received


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as taken:  # and does not listen; nobody else can meanwhile
        taken.bind(("127.0.0.1", 0))
        address = taken.getsockname()
        with pytest.raises(PeerError, match=f"rank 5 at 127.0.0.1:{address[1]}: Connection refused"):
            Peer(5, address, "00" * 16, 0).ask({"do": "hold", "number": 1})


def test_parity_of_another_generation_stays_until_a_commit_is_protected(tmp_path: Path) -> None:
    places = [tmp_path / "node"]
    for lineage in ("old", "new"):
        store = ParityStore(places, lineage)
        store.open((0, 0), 4, 3, 64)
        assert len(list(kept_images.parities_in(places))) == {"old": 1, "new": 2}[lineage]
    store.keep_only(4)
    assert [path.name for path in kept_images.parities_in(places)] == ["parity-new-0-0-0"]
    with pytest.raises(OSError, match="was not begun"):
        store.data((0, 0), 5, 0, 8, 3)
    with pytest.raises(OSError, match="ends before"):
        store.data((0, 0), 4, 64, 8, 3)
