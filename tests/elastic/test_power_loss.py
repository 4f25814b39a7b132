"""The power is cut at every moment of a commit, and the disk has only what was synced, and any part of the rest.

recorder.c records what a process does to its files; disk/journal.py computes what a disk may hold after a cut.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from disk import journal

from ddp import elastic
from ddp.elastic.files.folders import LocalFolder, open_folder
from ddp.elastic.images import kept_images
from ddp_launch_wings.inspection import commit_list
from ddp_launch_wings.inspection import saved_commits as inspection

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

HERE = Path(__file__).parent / "disk"
MUTANTS = {
    "files-are-not-synced": "keep-1",
    "names-are-not-synced": "keep-1",
    "the-name-comes-before-the-data": "keep-1",
    "folders-of-commits-are-not-synced": "keep-1",
    "old-folders-are-believed": "killed-at-8",
    "nobody-waits-for-other-ranks": "two-ranks",
}
FAILS = [
    *(f"fails-{op}-{nth}-EIO-once" for op, nth in (("D", 5), ("O", 3), ("W", 2), ("N", 2), ("U", 1))),
    *(f"fails-S-{nth}-EIO-once" for nth in (1, 3, 5, 6, 7, 12, 14)),  # folders, files
    *("fails-W-3-ENOSPC-once", "fails-W-3-ENOSPC-always", "fails-O-7-ENOSPC-always", "fails-S-14-EIO-always"),
]
KILLED = [f"killed-at-{call}" for call in range(1, 40, 4)]
SOUND = ("keep-1", "keep-2", "two-ranks", *KILLED, *FAILS)


@dataclass
class Recorded:
    """What a process did to a folder, one call after the other."""

    root: Path
    number: int
    before: list[journal.Call]
    calls: list[journal.Call]
    said: object = None  # by the process

    @property
    def folder(self) -> Path:
        return self.root / str(self.number) / "deep" / "commits"

    def disks(self) -> Iterator[tuple[int, journal.Disk]]:
        """The disk after each call."""
        disk = journal.Disk(self.root)
        for call in self.before:
            disk.play(call)
        disk.marks.clear()
        for at, call in enumerate(self.calls):
            disk.play(call)
            yield at, disk


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("recorder") / "recorder.so"
    words = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", built, HERE / "recorder.c", "-ldl"]
    subprocess.run(words, check=True)
    return built


@pytest.fixture(scope="module")
def recorded(recorder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """All scenarios, played by one process: it imports torch once."""
    there = tmp_path_factory.mktemp("recorded")
    for name in ("disk", "scratch"):
        (there / name).mkdir()
    names = [*SOUND, "unreadable", *(f"{scenario}:{mutant}" for mutant, scenario in MUTANTS.items())]
    env = os.environ | {
        "LD_PRELOAD": str(recorder),
        "RECORDER_ROOT": str(there / "disk"),
        "RECORDER_FILE": str(there / "record"),
        "SCRATCH": str(there / "scratch"),
    }
    command = [sys.executable, "-W", "ignore", str(HERE.parent / "programs" / "recorded.py"), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    calls = journal.read(there / "record")
    begins = [at for at, call in enumerate(calls) if call.op == "M" and call.flags < 0]
    assert len(begins) == len(names)
    said, found = dict(map(json.loads, done.stdout.splitlines())), {}
    for number, (begin, end) in enumerate(itertools.pairwise([*begins, len(calls)])):
        name = names[number]
        found[name] = Recorded(there / "disk", number, calls[:begin], calls[begin + 1 : end], said.get(name))
    return found


def test_the_record_is_whole(recorded: dict[str, Recorded]) -> None:
    """Otherwise a call that changes files would have been missed, and the simulation would prove nothing."""
    last = list(recorded.values())[-1]
    *_others, (_at, disk) = last.disks()
    real = {str(path.relative_to(last.root)): path for path in last.root.rglob("*") if path.is_file()}
    assert disk.now() == {name: path.read_bytes() for name, path in real.items()}
    assert len(real) > 20


def wrong_with(files: dict[str, bytes], promised: int, there: Path) -> str:
    """What is wrong with a disk that must hold this commit or a newer one; empty if nothing is."""
    journal.lay_out(files, there)
    for one in commit_list.listed(open_folder(there)):
        if one.has_manifest and (problems := list(inspection.problems(open_folder(there), one))):
            return f"commit {one.commit.number} has a manifest: {problems}"
    state = elastic.State(x=torch.zeros(1), y=torch.zeros(1), step=0, folder=there)
    resumed = state.resume()
    state.close()
    number = 0 if resumed is None else resumed.number
    if number < promised:
        return f"commit {promised} is lost: it is {number}"
    if number and (state.step, state.x.unique().tolist(), state.y.unique().tolist()) != (
        number,
        [number],
        [number],
    ):
        return f"commit {number} has the state of step {state.step}"
    return ""


def cuts(recorded: Recorded, there: Path, every: int, first: int = 0) -> Iterator[str]:
    """Cut the power after each call, or some of them, with another fate of what was not synced."""
    prefix = f"{recorded.number}/deep/commits/"
    for at, disk in recorded.disks():
        if at % every == first % every:
            left = {
                name.removeprefix(prefix): data
                for name, data in disk.after_a_cut(seed=at + 1000 * first).items()
                if name.startswith(prefix)
            }
            wrong = wrong_with(left, disk.marks[-1] if disk.marks else 0, there / f"{first}-{at}")
            yield f"after call {at} ({recorded.calls[at].op}): {wrong}" if wrong else ""


def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "ddp.elastic")  # unfinished files are expected here


@pytest.mark.parametrize("scenario", SOUND)
def test_no_commit_is_lost_or_wrong(
    recorded: dict[str, Recorded], scenario: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(caplog)
    found = list(
        cuts(recorded[scenario], tmp_path, every=2 if scenario in ("keep-1", "keep-2", "two-ranks") else 8)
    )
    assert len(found) > 5
    assert not [each for each in found if each]


@pytest.mark.nightly(
    instead=("::test_no_commit_is_lost_or_wrong", "::test_what_is_not_synced_in_time_is_found")
)
@pytest.mark.parametrize("scenario", SOUND)
@pytest.mark.parametrize("seed", range(20))
def test_no_commit_is_lost_or_wrong_in_many_cuts(
    recorded: dict[str, Recorded], scenario: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(caplog)
    assert not [each for each in cuts(recorded[scenario], tmp_path, every=1, first=seed) if each]


@pytest.mark.parametrize("scenario", FAILS)
def test_a_disk_that_fails_is_said_and_the_training_goes_on(
    recorded: dict[str, Recorded], scenario: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(caplog)
    found = recorded[scenario]
    assert isinstance(found.said, list)
    assert bool(found.said) == ("-U-" not in scenario)  # if only a removal fails, the new commit is there
    reason = "No space left on device" if "ENOSPC" in scenario else "Input/output error"
    for text in found.said:
        assert re.match(r"commit \d", text)
        assert reason in text
        assert "Training can continue" in text
    *_before, (_at, disk) = found.disks()
    left = {path.relative_to(found.folder).as_posix(): path.read_bytes() for path in found.folder.glob("*/*")}
    assert not [name for name in left if name.endswith(".part")]
    assert wrong_with(left, disk.marks[-1], tmp_path / "left") == ""
    assert disk.marks[-1] == 4 or scenario.endswith("always")


def test_a_commit_that_cannot_be_read_is_left_out(recorded: dict[str, Recorded]) -> None:
    assert recorded["unreadable"].said == 3


def test_what_the_disk_cannot_read_is_an_error_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is not there is to the kernel what a page is that the disk cannot read: SIGBUS for who touches it."""

    def mapped_then_cut(path: Path) -> mmap.mmap:
        mapped = map_for_reading(path)
        os.truncate(path, 4096)
        return mapped

    (tmp_path / "x").write_bytes(bytes(40960))
    map_for_reading = kept_images.map_for_reading
    monkeypatch.setattr(kept_images, "map_for_reading", mapped_then_cut)
    with pytest.raises(OSError, match="the disk does not give all of it"):
        LocalFolder(tmp_path).read("x")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_not_synced_in_time_is_found(
    recorded: dict[str, Recorded], mutant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(caplog)
    found = itertools.chain.from_iterable(
        cuts(recorded[f"{MUTANTS[mutant]}:{mutant}"], tmp_path, every=1, first=seed) for seed in range(20)
    )
    assert any(found)
