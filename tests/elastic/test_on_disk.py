"""Files of commits: whole or not there, whatever happens while they are written and afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from launched import Launched

from ddp import commits, elastic

if TYPE_CHECKING:
    from collections.abc import Iterator

DYING_WRITER = Path(__file__).parent / "programs" / "dying_writer.py"


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What was found where the writer was killed, by the point where it was."""
    words = ("--nproc-per-node", "1", "--max-restarts", "4", "--crash-loop", "off", str(DYING_WRITER))
    job = Launched(tmp_path_factory.mktemp("dying"), *words)
    try:
        assert job.wait(100) == 0, job.stderr()
        assert "is left out" not in job.stdout() + job.stderr(), "an unfinished file is nothing to warn of"
        found = [json.loads(line) for line in (job.there / "looked").read_text().splitlines()]
        yield {each["point"]: each for each in found}
    finally:
        job.clean_up()


@pytest.mark.parametrize(
    ("point", "newest"), [("half-written", 2), ("written", 2), ("before its name", 2), ("named", 3)]
)
def test_killed_while_it_writes(left_behind: dict[str, dict[str, Any]], point: str, newest: int) -> None:
    found = left_behind[point]
    assert (found["number"], found["step"], found["x"]) == (newest, newest, [float(newest)])
    whole = [file for file in found["files"] if commits.parsed(file)]
    assert len(whole) == newest
    assert len(found["files"]) - len(whole) == 3 - newest


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
    there = sorted(folder.iterdir())
    assert len(there) == 6
    size = there[0].stat().st_size
    for path, at in ((there[5], size - 100), (there[4], 200)):  # in its data, in its index
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
    assert sorted(line.split(" is left out: ")[0] for line in warned) == [str(path) for path in there[2:]]
    for words in ("checksum of its data", "checksum of its index", "bytes of"):
        assert sum(words in line for line in warned) == 1, warned


def test_nothing_whole_is_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    state = elastic.State(x=torch.zeros(1000), step=0, folder=folder)
    assert state.resume() is None
    state.close()
    assert state.step == 0
    assert len(caplog.records) == 6


def test_flushed_at_exit_and_only_the_last_are_kept(tmp_path: Path) -> None:
    """The script never waits for the writer itself, and never says goodbye."""
    script = (
        "import sys, torch\nfrom ddp import elastic\n"
        "state = elastic.State(x=torch.ones(1 << 20), step=0, folder=sys.argv[1], disk_every=2, keep=2)\n"
        "state.resume()\n"
        "for state.step in range(1, 11): state.commit()\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    names = [commits.parsed(path.name) for path in tmp_path.iterdir()]
    assert sorted(name.commit.number for name in names if name) == [8, 10]


def test_what_goes_wrong_is_raised_at_the_next_commit(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    state = elastic.State(step=0, folder=folder, disk_every=1)
    state.resume()
    folder.write_text("a file where the folder should be")
    state.commit()
    with pytest.raises(elastic.CommitError, match=rf"could not be written to {folder}: .*Make room"):
        state.flush()
    state.commit()
    for thread in [each for each in threading.enumerate() if each.name == "ddp-commit"]:
        thread.join()
    with pytest.raises(elastic.CommitError):
        state.commit()
    folder.unlink()
    state.commit()
    state.close()
    assert list(folder.iterdir()), "and goes on when it can"
