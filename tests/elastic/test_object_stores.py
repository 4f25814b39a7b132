"""Commits in an object store: complete or not there, whatever the store and the line to it do meanwhile."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from launched import eventually
from object_store import CREDENTIALS, Line, s3_server

from ddp import elastic
from ddp.elastic.files import folders

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

URL = "s3://bucket/run"
MIB = 1 << 20

s3fs: Any = pytest.importorskip("s3fs", reason="s3fs is in requirements/test.txt")
# What the libraries do at their end, and their own deprecations
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore::ResourceWarning", "ignore:torch.distributed is:UserWarning"
)


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def line(server_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Line]:
    """The line to a store whose bucket is empty."""
    made = Line(server_port)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(folders, "_LONGEST_PAUSE_S", 0.5)
    monkeypatch.setattr(folders, "_PIECE", 5 * MIB)  # the smallest part that S3 takes
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    if store.exists("bucket"):
        store.rm("bucket", recursive=True)
    store.mkdir("bucket")
    yield made
    made.release()
    made.cut()


def stored() -> list[str]:
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    return sorted(path.removeprefix("bucket/run/") for path in store.find("bucket"))


def numbers() -> list[int]:
    """The commits that are complete."""
    return [int(path.split("-")[1]) for path in stored() if path.endswith(".metadata")]


def training(n_floats: int, **options: Any) -> elastic.State:
    state = elastic.State(x=torch.zeros(n_floats), step=0, folder=URL, **options)
    state.resume()
    return state


def resumed() -> tuple[int, float]:
    """The step and the value that another process finds in the store alone."""
    state = elastic.State(x=torch.zeros(1), step=0, folder=URL)
    found = state.resume()
    assert found is not None
    assert not found.in_memory
    state.close()
    assert state.x.unique().numel() == 1
    return state.step, state.x[0].item()


def test_commits_are_written_kept_and_resumed(line: Line) -> None:
    state = training(2 * MIB, disk_every=1, keep=2)  # 8 MiB: an upload in two parts
    for state.step in (1, 2, 3):
        state.x += 1
        state.commit()
        state.flush()
    state.close()
    assert [path.rpartition("/")[2] for path in stored()] == [".metadata", "part-0-of-1.distcp"] * 2
    assert numbers() == [2, 3]
    assert resumed() == (3, 3.0)
    found = {"x": torch.zeros(2 * MIB), "step": 0}
    read_by_torch(f"{URL}/{stored()[-1].partition('/')[0]}", found)
    assert (found["step"], found["x"].unique().tolist()) == (3, [3.0])


def read_by_torch(url: str, found: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    dcp.load(found, storage_reader=FsspecReader(url), no_dist=True)


def test_a_line_that_is_cut_in_the_middle_of_a_commit_and_mended(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    state = training(3 * MIB, disk_every=5)
    line.when_uploaded(5 * MIB, line.cut)  # of 12
    for state.step in range(1, 10):
        state.x += 1
        state.commit()
    eventually(lambda: "trying again" in caplog.text, what="the store is missed")
    for state.step in range(10, 20):  # the store is away all this time
        state.x += 1
        state.commit()
    assert "commit 10 is not written to s3://bucket/run: commit 5 is still being written" in caplog.text
    line.mend()
    eventually(lambda: "available again" in caplog.text, what="the store is back")
    state.flush()
    assert numbers() == [5]
    found = {"x": torch.zeros(3 * MIB), "step": 0}
    read_by_torch(f"{URL}/{stored()[-1].partition('/')[0]}", found)
    assert (found["step"], found["x"].unique().tolist()) == (5, [5.0])
    state.x += 1
    state.step = 20
    state.commit()
    state.close()
    assert resumed() == (20, 20.0)


def test_a_store_that_does_not_answer_does_not_hold_up_the_training(line: Line) -> None:
    state = training(MIB, disk_every=1)
    line.hold()
    began = time.monotonic()
    for state.step in range(1, 30):
        state.x += 1
        state.commit()
    assert time.monotonic() - began < 60
    line.release()
    state.flush()
    state.close()
    step, value = resumed()
    assert (step, value) == (numbers()[-1], float(step))


def test_what_fails_for_good_is_said_and_raised_only_by_those_who_wait_for_it(
    line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PATIENCE_S", 0.1)
    state = training(1000, disk_every=1)
    line.cut()
    for state.step in range(1, 4):
        state.commit()
        for thread in [each for each in threading.enumerate() if each.name == "ddp-commit"]:
            thread.join()
    assert "was not written to s3://bucket/run" in caplog.text
    with pytest.raises(elastic.CommitError, match=r"checkpoint is incomplete: rank 0: commit 4 could not"):
        state.checkpoint()
    line.mend()
    monkeypatch.setattr(folders, "PATIENCE_S", 60.0)
    state.checkpoint()
    state.close()
    assert numbers() == [5]


def test_a_job_does_not_begin_anew_because_the_store_is_away(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "PATIENCE_S", 0.1)
    monkeypatch.setattr("ddp.elastic.resume._PATIENCE_WITH_MEMORY_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")  # memory outlives the process
    line.cut()
    with pytest.raises(elastic.CommitError, match=r"cannot list the commits in s3://bucket/run: "):
        training(10)
    line.mend()
    monkeypatch.setattr(folders, "PATIENCE_S", 60.0)
    state = training(10)
    state.step = 7
    state.commit()
    state._keeper = None  # the process dies
    state._forget_leaving()
    line.cut()
    again = elastic.State(x=torch.zeros(1), step=0, folder=URL)
    assert again.resume() == elastic.Resumed(1, in_memory=True, world_size=1)
    assert "only commits in memory" in caplog.text
    again.close()


class Broken(RuntimeError):
    pass


def test_of_an_upload_that_breaks_off_nothing_appears(line: Line) -> None:
    folder = folders.RemoteFolder(URL)

    def content() -> Iterator[bytes]:
        yield bytes(12 * MIB)
        raise Broken

    for _again in range(2):
        with pytest.raises(Broken):
            folders._upload(folder._fs, "bucket/run/x", content())
    assert stored() == []
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    assert not store.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


def test_a_store_that_has_less_than_it_took_is_not_believed(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PATIENCE_S", 0.1)
    folder = folders.RemoteFolder(URL)
    monkeypatch.setattr(folders.RemoteFolder, "_size", lambda _self, _file: 3)
    with pytest.raises(OSError, match="the store has 3 of 5 bytes"):
        folder.write("commit-0000000001-a/part-0-of-1.distcp", lambda: [b"12345"])


class WrongETags:
    """Answers in which so many ETags are those of something else. They have the right form and length."""

    FORM = re.compile(rb'(?i)(etag: ?"|<etag>(?:"|&quot;))([0-9a-f]{32})')

    def __init__(self, lies: int) -> None:
        self.lies = lies

    def __call__(self, data: bytes) -> bytes:
        def wrong(found: re.Match[bytes]) -> bytes:
            if self.lies == 0:
                return found[0]
            self.lies -= 1
            return found[1] + found[2][::-1]

        return self.FORM.sub(wrong, data)


@pytest.mark.parametrize("lies", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 3)), 10**9])
def test_wrong_etags_lose_no_commit_and_give_no_wrong_state(
    line: Line, lies: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parts of an upload are put together by their ETags, so a wrong one makes the store refuse the object."""
    state = training(2 * MIB, disk_every=1)  # two parts
    state.step = 1
    state.commit()
    state.flush()
    line.on_answer = liar = WrongETags(lies)
    if lies > 100:
        monkeypatch.setattr(folders, "PATIENCE_S", 1.0)
    state.step = 2
    state.x += 2
    state.commit()
    if lies > 100:
        with pytest.raises(elastic.CommitError, match="commit 2 could not be written"):
            state.flush()
        line.on_answer = WrongETags(0)
        state.close()
        assert (numbers(), resumed()) == ([1], (1, 0.0))
        return
    state.flush()
    state.close()
    assert liar.lies == 0
    assert "cannot write commit-0000000002" in caplog.text
    assert (numbers(), resumed()) == ([1, 2], (2, 2.0))


def test_the_last_commit_arrives_although_the_script_does_not_wait_for_it(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that resolve names cannot be started any more while the interpreter shuts down."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{line.port}")
    script = (
        "import torch\nfrom ddp import elastic\n"
        f"state = elastic.State(x=torch.ones({MIB}), step=5, folder='{URL}', disk_every=1)\n"
        "state.resume()\nstate.commit()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert resumed() == (5, 1.0)


@pytest.mark.parametrize(
    ("folder", "said"), [("nowhere://x/y", "nowhere"), ("webhdfs9://x", "invalid folder='webhdfs9://x'")]
)
def test_an_address_that_nobody_knows_is_refused_at_once(folder: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        elastic.State(x=1, folder=folder)
