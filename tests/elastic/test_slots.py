"""A thread makes large slots before commits need them, and removes nothing that a resume may need."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import pytest

from ddp.elastic.images import kept_images

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 8 << 20


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "slots"


@pytest.fixture
def slots_of(place: Path) -> Iterator[Any]:
    made: list[kept_images.Slots] = []

    def new(count: int, spared: tuple[str, ...] = (), n_whole: int = 1) -> kept_images.Slots:
        made.append(kept_images.Slots([place], 0, count, set(spared), n_whole=n_whole))
        return made[-1]

    yield new
    for each in made:
        each.remove()


def commit(slots: kept_images.Slots, text: bytes) -> kept_images.Slot:
    slot = slots.next(SIZE)
    slot.buffer[: len(text)] = text
    slots.keep(slot)
    return slot


def files(place: Path) -> dict[str, tuple[int, bytes]]:
    """Their inodes and how they begin."""
    return {each.name: (each.stat().st_ino, each.read_bytes()[:3]) for each in place.iterdir()}


def before_the_restart(slots_of: Any, place: Path, count: int) -> dict[str, tuple[int, bytes]]:
    """A generation that has made commits "one" and "two"."""
    slots = slots_of(count)
    for text in (b"one", b"two"):
        commit(slots, text)
    slots.settle()
    return files(place)


def test_the_second_slot_is_made_while_the_training_goes_on(slots_of: Any, place: Path) -> None:
    slots = slots_of(3)
    commit(slots, b"one")
    slots.settle()
    there = files(place)
    assert [text for _inode, text in there.values()] == [b"one", bytes(3)]
    commit(slots, b"two")
    slots.settle()
    assert {name: inode for name, (inode, _text) in files(place).items()} == {
        name: inode for name, (inode, _text) in there.items()
    }, "a third one is made only if a commit is being written when the next one needs a slot"


def test_after_a_restart_slots_are_made_that_nobody_needs_any_more(slots_of: Any, place: Path) -> None:
    before = before_the_restart(slots_of, place, 2)
    assert {name: text for name, (_inode, text) in before.items()} == {
        "local0.slot0": b"one",
        "local0.slot1": b"two",
    }
    slots = slots_of(2, spared=("local0.slot1",))
    slots.replace_old()
    slots.settle()
    now = files(place)
    assert now["local0.slot1"] == before["local0.slot1"]  # the commit from which all have resumed
    assert now["local0.slot0"][1] == bytes(3)
    first = commit(slots, b"new")
    slots.settle()
    assert first.path.name == "local0.slot0"
    assert files(place)["local0.slot0"] == (now["local0.slot0"][0], b"new")
    # Other ranks may not have completed their first commit, and then all resume from this one.
    assert files(place)["local0.slot1"] == before["local0.slot1"]
    assert commit(slots, b"far").path.name == "local0.slot1"


def test_a_slot_that_is_there_is_used_before_the_commit_of_the_resume_is_overwritten(
    slots_of: Any, place: Path
) -> None:
    old = slots_of(3)
    commit(old, b"one").being_written = True
    commit(old, b"two")
    commit(old, b"six")
    slots = slots_of(3, spared=("local0.slot0",))
    slots.replace_old()
    assert [commit(slots, b"new").path.name for _commit in range(3)] == [
        "local0.slot1",
        "local0.slot2",
        "local0.slot1",
    ]
    assert files(place)["local0.slot0"][1] == b"one"


def test_a_held_slot_is_not_replaced(slots_of: Any, place: Path) -> None:
    before = before_the_restart(slots_of, place, 2)
    slots = slots_of(4)
    slots.held = set(before)
    slots.replace_old()
    slots.settle()
    assert files(place) == before


def test_after_a_commit_nothing_is_replaced(slots_of: Any, place: Path) -> None:
    """As with redundancy, where a resume makes a commit: then no slot is marked as spared."""
    before = before_the_restart(slots_of, place, 2)
    slots = slots_of(2, spared=("local0.slot1",))
    commit(slots, b"new")
    slots.replace_old()
    slots.settle()
    assert files(place)["local0.slot1"] == before["local0.slot1"]


def test_the_pages_are_there_when_the_commit_comes(slots_of: Any, place: Path) -> None:
    before_the_restart(slots_of, place, 2)
    slots = slots_of(2, spared=("local0.slot1",))
    slots.replace_old()
    slot = slots.next(SIZE)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, SIZE, 4096):
        slot.buffer[at] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < SIZE // 4096 // 4


def test_a_small_slot_needs_no_thread(slots_of: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    monkeypatch.setattr(kept_images.Slots, "_make_in_thread", lambda _slots, numbers: wanted.extend(numbers))
    slots = slots_of(2)
    for _commit in range(2):
        slots.keep(slots.next(1 << 20))
    slots_of(2).replace_old()
    assert not wanted


def test_no_space_is_an_error_of_the_commit_that_needs_it(
    slots_of: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_of(2)
    first = slots.next(SIZE)

    def full(places: list[Path], name: str, n_bytes: int) -> Any:
        raise kept_images.ScratchError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(kept_images, "new_file", full)
        slots.keep(first)
        with pytest.raises(kept_images.ScratchError, match="no space"):
            slots.next(SIZE)
    assert commit(slots, b"two").path.name == "local0.slot1"


def test_where_no_thread_can_be_started_commits_make_their_slots(
    slots_of: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kept_images.threading.Thread, "start", refuse)
    slots = slots_of(2)
    assert [commit(slots, b"one").path.name for _commit in range(3)] == [
        "local0.slot0",
        "local0.slot1",
        "local0.slot0",
    ]
