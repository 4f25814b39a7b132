"""Files of commits: whole or not there, whatever happens while they are written and afterwards."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from launched import Launched

from ddp import elastic
from ddp.elastic import commits
from ddp.elastic.files import folders as folder_module
from ddp.elastic.files import part_file
from ddp.elastic.images import image

if TYPE_CHECKING:
    from pathlib import Path


def parts(folder: Path) -> list[Path]:
    """The files with parts of commits, the oldest commit first."""
    return sorted(folder.glob("*/*.distcp"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With six commits in it."""
    state = elastic.State(x=torch.zeros(1000), step=0, folder=tmp_path, disk_every=1, keep=9)
    assert state.resume() is None
    for state.step in range(1, 7):
        state.x += 1
        state.commit()
    state.close()
    return tmp_path


def test_damaged_files_are_named_and_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = parts(folder)
    assert len(there) == 6
    size = there[0].stat().st_size
    for path, at in ((there[5], 600), (there[4], size - 200)):  # in its data, in its index
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    with there[3].open("r+b") as file:
        file.truncate(size - 1)
    there[2].write_bytes(b"")
    (folder / "notes.txt").write_text("not a commit")
    state = elastic.State(x=torch.zeros(1000), step=0, folder=folder)
    resumed = state.resume()
    state.close()
    assert resumed is not None
    assert (resumed.number, state.step, state.x.unique().tolist()) == (2, 2, [2.0])
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(there[2:])
    assert all(any(str(path) in line for line in warned) for path in there[2:])
    for fault in ("checksum of the data", "checksum of the index", "truncated"):
        assert sum(fault in line for line in warned) == 1, warned


def test_nothing_whole_is_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in parts(folder):
        path.write_bytes(path.read_bytes()[:-1])
    state = elastic.State(x=torch.zeros(1000), step=0, folder=folder)
    assert state.resume() is None
    state.close()
    assert state.step == 0
    assert len(caplog.records) == 6


def test_flushed_at_exit_and_only_the_last_are_kept(tmp_path: Path) -> None:
    """The script never waits for the writer itself, and never says goodbye."""
    script = (
        "import os, sys, torch\nfrom ddp import elastic\nfrom ddp.elastic.images import kept_images\n"
        "state = elastic.State(x=torch.ones(1 << 20), step=0, folder=sys.argv[1], disk_every=2, keep=2)\n"
        "state.resume()\n"
        "state.commit()\n"
        "if os.fork() == 0: raise SystemExit\n"  # a child's end is not the training's
        "os.wait()\n"
        "assert list(kept_images.folders(os.environ)[0].iterdir())\n"
        "for state.step in range(2, 11): state.commit()\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    names = [commits.parse_folder_name(path.name) for path in tmp_path.iterdir()]
    assert sorted(name.number for name in names if name) == [8, 10]


@pytest.mark.parametrize("has_the_call", [True, False])
def test_the_disk_begins_before_all_is_checked_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_the_call: bool
) -> None:
    """The disk begins with the first tensors while the checksums of later ones are computed; all ranges are pages."""
    order: list[str] = []
    begun: list[tuple[int, int]] = []

    def begin(_fd: int, at: int, n_bytes: int, _flags: int) -> int:
        begun.append((at, n_bytes))
        order.append("begin")
        return -1  # also its errors change nothing

    def sums(self: image.Image, number: int, real: Any = image.Image.leaf_sum) -> int:
        order.append("checksum")
        result: int = real(self, number)
        return result

    monkeypatch.setattr(folder_module, "_sync_file_range", begin if has_the_call else None)
    monkeypatch.setattr(folder_module, "_BEGIN_EVERY", 1 << 20)
    monkeypatch.setattr(image.Image, "leaf_sum", sums)
    tensors: dict[str, Any] = {f"x{number}": torch.full((300_007,), float(number)) for number in range(4)}
    state = elastic.State(**tensors, folder=tmp_path, disk_every=1)
    state.resume()
    state.commit()
    state.close()
    (part,) = parts(tmp_path)
    part_file.PartFile(memoryview(part.read_bytes())).check_data()
    assert order[-1] == ("begin" if has_the_call else "checksum")
    assert ("begin" in order[: order.index("checksum", 2)]) == has_the_call
    assert begun == [] or sum(n_bytes for _at, n_bytes in begun) > part.stat().st_size - (2 << 20)
    end = 0
    for at, n_bytes in begun:
        assert (at, at % mmap.PAGESIZE, n_bytes % mmap.PAGESIZE) == (end, 0, 0)
        end = at + n_bytes


def test_what_goes_wrong_is_raised_at_a_later_commit_which_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    sampler = elastic.ElasticSampler(1000)
    state = elastic.State(step=0, sampler=sampler, folder=folder, disk_every=1)
    state.resume()
    folder.write_text("a file where the folder should be")
    state.commit(samples=10)
    with pytest.raises(elastic.CommitError, match=rf"^commit 1\b.*{folder}"):
        state.flush()
    state.commit(samples=10)
    for number in range(3, 8):  # it waits for the one before, whose error it is then
        with pytest.raises(elastic.CommitError, match=f"^commit {number - 1} "):
            state.commit(samples=10)
        assert sampler.consumed == 10 * number
    with pytest.raises(elastic.CommitError, match=r"^commit 7 "):
        state.flush()
    folder.unlink()
    state.commit(samples=10)
    state.close()
    (written,) = folder.iterdir()
    assert commits.parse_folder_name(written.name).number == 8  # type: ignore[union-attr]


def test_nobody_waits_for_the_removal_of_old_commits_and_its_failure_is_not_the_new_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_remove, remove = threading.Event(), folder_module.LocalFolder.remove

    def later(_folder: Any, files: list[str]) -> None:
        assert may_remove.wait(60)
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(folder_module.LocalFolder, "remove", later)
    state = elastic.State(step=0, folder=tmp_path / "commits", disk_every=1, keep=1)
    state.resume()
    for _ in range(2):
        state.commit()
        state.flush()  # the removal of the first one is under way when this returns
    assert len(list((tmp_path / "commits").iterdir())) == 2
    may_remove.set()
    state.commit()
    state.flush()
    state._keeper._writer.finish()  # type: ignore[union-attr]
    assert caplog.text.count("old commits in") == 1
    assert "not permitted" in caplog.text
    monkeypatch.setattr(folder_module.LocalFolder, "remove", remove)
    state.commit()
    state.close()
    (left,) = (tmp_path / "commits").iterdir()
    assert commits.parse_folder_name(left.name).number == 4  # type: ignore[union-attr]


def test_without_a_thread_to_be_had_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    state = elastic.State(step=0, folder=tmp_path, disk_every=1, keep=9)
    state.resume()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _step in range(4):
        state.commit()
    assert len(list(tmp_path.iterdir())) == 4
    state.close()


def test_a_state_that_is_let_go_of_finishes_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(fd: int) -> None:
        time.sleep(0.3)
        os.fsync(fd)

    monkeypatch.setattr(folder_module, "os", type("os", (), vars(os) | {"fsync": slow}))

    def main() -> None:
        state = elastic.State(step=0, folder=tmp_path, disk_every=1)
        state.resume()
        state.commit()

    main()
    (there,) = tmp_path.iterdir()
    assert sorted(path.name for path in there.iterdir()) == [".metadata", "part-0-of-1.distcp"]


def test_what_was_left_out_does_not_push_out_what_is_new(folder: Path) -> None:
    for path in parts(folder)[3:]:
        path.write_bytes(path.read_bytes()[:-1])
    for number in (4, 5, 6):
        state = elastic.State(x=torch.zeros(1000), step=0, folder=folder, keep=2)
        resumed = state.resume()
        assert resumed is not None
        assert (resumed.number, state.step) == (number - 1, number - 1)
        state.step = number
        state.checkpoint()
        state.close()


ONE_DISK_IS_FULL = """
import os, sys, torch
import torch.distributed as dist
import ddp
from ddp import elastic

place = ddp.init()
folder = os.path.join(os.environ["THERE"], f"commits-{place.rank}")
state = elastic.State(step=0, folder=folder)
state.resume()
if place.rank == 0:  # after the checks of the folder
    if os.path.isdir(folder):
        os.rmdir(folder)
    open(folder, "w").close()
for state.step in (1, 2):
    if state.step == 2 and place.rank == 0:
        os.unlink(folder)
    try:
        state.checkpoint()
        print(f"rank {place.rank}: checkpoint {state.step}", flush=True)
    except elastic.CommitError as error:
        print(f"rank {place.rank}: {error}", flush=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
state.close()
ddp.shutdown()
"""


def test_a_checkpoint_that_fails_on_one_rank_fails_on_all_and_they_stay_in_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_DISK_IS_FULL)
    job = Launched(tmp_path / "job", "--nproc-per-node", "2", str(script))
    try:
        assert job.wait(100) == 0, job.stderr()
        for rank in (0, 1):
            assert f"rank {rank}: the checkpoint is incomplete: rank 0: commit 1 " in job.stdout()
            assert f"rank {rank}: checkpoint 2" in job.stdout()
    finally:
        job.clean_up()
