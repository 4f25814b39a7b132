"""A bit that flips in a commit: the state is never wrong, the file is named, and the commit before is used."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import random
import zipfile
import zlib
from typing import TYPE_CHECKING

import pytest
import torch

from ddp import elastic
from ddp.elastic.files import manifest, part_file
from ddp.elastic.files.checkpoint import Checkpoint, CheckpointError
from ddp.elastic.files.folders import open_folder
from ddp.elastic.images import image
from ddp_launch_wings.inspection import commit_list
from ddp_launch_wings.inspection import elastic_command as command
from ddp_launch_wings.inspection import saved_commits as inspection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N_FLOATS = 600
FILES = ("part-0-of-1.distcp", ".metadata")
pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two commits, the second one of step 2."""
    there = tmp_path_factory.mktemp("flips") / "commits"
    state = elastic.State(
        x=torch.zeros(N_FLOATS), notes=["begun"], step=0, folder=there, disk_every=1, keep=2
    )
    state.resume()
    for state.step in (1, 2):
        state.x.fill_(state.step)
        state.notes.append(f"step {state.step}")
        state.commit()
    state.close()
    return there


def newest(folder: Path, file: str) -> Path:
    return max(folder.iterdir()) / file


class Flipped:
    """A file with one wrong bit, as long as this is open."""

    def __init__(self, path: Path, at: int, bit: int) -> None:
        self._path, self._at, self._bit = path, at, bit

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_error: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._at)
            byte = file.read(1)[0]
            file.seek(self._at)
            file.write(bytes([byte ^ 1 << self._bit]))


def places(folder: Path, file: str, count: int) -> Iterator[tuple[int, int]]:
    """Bytes, spread over a file, and a bit of each; both ends are among them."""
    size, rng = newest(folder, file).stat().st_size, random.Random(file)
    for number in range(count):
        yield round(number * (size - 1) / (count - 1)), rng.randrange(8)


def check_resume(folder: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    state = elastic.State(x=torch.zeros(1), notes=[], step=0, folder=folder)
    resumed = state.resume()
    state.close()
    assert resumed is not None
    steps = [f"step {step}" for step in range(1, state.step + 1)]
    assert (state.x.unique().tolist(), state.notes) == ([resumed.number], ["begun", *steps])
    if file.startswith("part"):
        assert (resumed.number, state.step) == (1, 1)
        assert str(newest(folder, file)) in caplog.text
    else:  # a resume needs only the parts
        assert (resumed.number, state.step) == (2, 2)
    (_sound, damaged) = commit_list.listed(open_folder(folder))
    assert [text for text in inspection.problems(open_folder(folder), damaged) if file in text]


def check_checkpoint(folder: Path) -> bool:
    """Whether a program that begins from the commit notices; otherwise the state must be right."""
    try:
        checkpoint = Checkpoint(max(folder.iterdir()))
        found = checkpoint.tensor("x"), checkpoint.tree("notes"), checkpoint.value("step")
    except (CheckpointError, image.DamagedImage, ValueError, KeyError):
        return True
    assert (found[0].unique().tolist(), *found[1:]) == ([2.0], ["begun", "step 1", "step 2"], 2)
    return False


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found(folder: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    noticed = []
    for at, bit in places(folder, file, 40):
        with Flipped(newest(folder, file), at, bit):
            check_resume(folder, file, caplog)
            noticed.append(check_checkpoint(folder))
    assert any(noticed)


@pytest.mark.nightly(instead="::test_a_flipped_bit_is_found")
@pytest.mark.timeout(1200)  # on a busy machine
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found_in_every_byte(
    folder: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    for at, bit in places(folder, file, newest(folder, file).stat().st_size):
        with Flipped(newest(folder, file), at, bit):
            check_resume(folder, file, caplog)
            check_checkpoint(folder)


def test_the_damaged_file_is_named_to_those_who_begin_from_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = newest(folder, FILES[0])
    place = Checkpoint(part.parent).table.tensors["x"].chunks[0].place
    with Flipped(part, place.at + place.length // 2, 3):
        state = elastic.State(x=torch.zeros(N_FLOATS), notes=[], step=0, start_from=part.parent)
        with pytest.raises(CheckpointError, match=f"{part.name} in {part.parent} is damaged: wrong checksum"):
            state.resume()
        assert command.main(["export", str(folder), str(tmp_path / "out.safetensors")]) == 2
        assert "is damaged" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_checksums_are_there_although_the_script_has_switched_them_off() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        saved = image.serialize([1, "two"])
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert part_file.is_intact(saved)
    assert zipfile.ZipFile(io.BytesIO(saved)).testzip() is None


def plain() -> bytes:
    return image.serialize([1.0, 2.0, 3.0])


def tensor() -> bytes:
    data = torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()
    head, tail = part_file.envelope("torch.float32", (3,), len(data), at=0).around(zlib.crc32(data))
    return head + data + tail


@pytest.mark.parametrize("kind", [plain, tensor])
def test_an_archive_with_a_flipped_bit_is_damaged_or_says_the_same(kind: Callable[[], bytes]) -> None:
    saved, taken = bytearray(kind()), 0
    for at, bit in itertools.product(range(len(saved)), (1, 4)):
        saved[at] ^= 1 << bit
        if part_file.is_intact(bytes(saved)):
            taken += 1
            with contextlib.suppress(RuntimeError, ValueError, pickle.UnpicklingError):  # torch refuses it
                assert list(image.read_plain(bytes(saved))) == [1.0, 2.0, 3.0]
        saved[at] ^= 1 << bit
    assert 0 < taken < len(saved) * 2


def test_every_file_of_a_commit_is_tried(folder: Path) -> None:
    assert sorted(path.name for path in max(folder.iterdir()).iterdir()) == sorted(FILES)
    assert manifest.read(newest(folder, ".metadata").read_bytes()).facts is not None
