"""Commits on disk are checkpoints of torch.distributed.checkpoint: torch reads ours, and damage to one is seen."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ddp import elastic
from ddp.elastic import commits
from ddp.elastic.files import dcp, manifest, part_file
from ddp.elastic.files import folders as folder_module
from ddp.elastic.files.folders import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Told

READER = Path(__file__).parent / "programs" / "stock_reader.py"
OLD = Path(__file__).parent.parent / "released" / "commits"


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))


def newest(folder: Path) -> Path:
    return max(folder.glob("commit-*"))


# --- torch reads ours --------------------------------------------------------------------------------


@pytest.mark.nightly(instead=("::test_an_archive_is_what_torch_and_zip_read",))
@pytest.mark.parametrize(
    ("model", "nproc", "readers"),
    [
        ("fsdp2", 3, ("ddp:1", "fsdp2:2")),
        ("torch", 2, ("ddp:2", "fsdp2:2")),
        ("fsdp2", 2, ("ddp:2", "hsdp:4")),
        ("hsdp", 4, ("ddp:1", "fsdp2:3", "hsdp:2")),
    ],
)
def test_torch_alone_reads_a_commit_into_other_worlds_and_shardings(
    train: Callable[..., Told], tmp_path: Path, model: str, nproc: int, readers: tuple[str, ...]
) -> None:
    folder = tmp_path / "commits"
    told = train(nproc, model=model, stop=5, epochs=1, state={"folder": str(folder), "disk_every": 1})
    losses = told.of("step")[-1]["losses"]
    command = [sys.executable, "-I", str(READER), str(newest(folder)), *readers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f"{each['kind']}:{each['world']}" for each in found] == list(readers)
    for each in found:
        assert each["digest"] == told.digests()[5], each
        assert (each["lr"], each["last_epoch"], each["losses"]) == (0.01 * 0.7, 5, losses)


def test_our_own_shardings_read_each_other(train: Callable[..., Told], tmp_path: Path) -> None:
    state = {"folder": str(tmp_path / "commits"), "disk_every": 1}
    told = train(2, model="torch", stop=2, epochs=1, state=state)
    for world, model, stop in ((3, "fsdp2", 4), (2, "ours", 6)):
        after = train(world, model=model, stop=stop, epochs=1, state=state)
        before = told.digests()[stop - 2]
        assert {line["digest"] for line in after.of("resumed")} == {before}
        told = after


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (4, 5, 300)])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "bool", "complex64", "uint16", "int64", "float8_e4m3fn"]
)
def test_an_archive_is_what_torch_and_zip_read(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    made = part_file.envelope(str(tensor.dtype), shape, len(data), at=13)
    head, tail = made.around(zlib.crc32(data))
    assert (13 + len(head)) % part_file.ALIGN == 0
    whole = io.BytesIO(head + data + tail)
    again = torch.load(whole, weights_only=True)
    assert (again.dtype, again.shape, again.is_contiguous()) == (tensor.dtype, tensor.shape, True)
    assert torch.equal(again.to(torch.complex64), tensor.to(torch.complex64))
    assert zipfile.ZipFile(whole).testzip() is None


def saved_by_torch(folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    state = {"model": nn.Linear(3, 4).state_dict(), "step": 3, "nested": {"a": [1, {"b": torch.ones(2)}]}}
    dcp.save(state, checkpoint_id=folder)
    return state


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's: without a process group it saves alone
def test_metadata_is_what_torch_would_have_written(tmp_path: Path) -> None:
    saved_by_torch(tmp_path / "torch")
    data = (tmp_path / "torch" / ".metadata").read_bytes()
    table = dcp.read(data)
    assert {"model.weight", "model.bias", "nested.a.1.b"} == set(table.tensors)
    torchs, ours = pickle.loads(data), pickle.loads(dcp.pickled([dcp.fragment(table)]))
    for name in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(ours, name) == getattr(torchs, name)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("ran").touch, ())


@pytest.mark.parametrize("value", [Malicious(), {"a": print}, [], 3])
def test_metadata_is_read_without_executing_it(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dcp.UnreadableMetadata):
        dcp.read(pickle.dumps(value))
    with pytest.raises(dcp.UnreadableMetadata):
        dcp.read(pickle.dumps({"a": 1})[:-3])
    assert not Path("ran").exists()


# --- the folder --------------------------------------------------------------------------------------


def test_files_of_release_0_1_0_are_read_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    shutil.copytree(OLD, folder)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = elastic.State(model=model, optimizer=optimizer, step=0, folder=folder, disk_every=1, keep=1)
    assert state.resume() == elastic.Resumed(2, in_memory=False, world_size=1)
    assert state.step == 2
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert model.bias.tolist() == pytest.approx([-0.8558840155601501, -1.9921455383300781])
    assert [each["momentum_buffer"].unique().item() for each in optimizer.state.values()] == [
        pytest.approx(1.9)
    ] * 2
    state.commit()
    state.close()
    assert [commits.parse_folder_name(path.name) is not None for path in folder.iterdir()] == [True]


def test_the_rank_that_finishes_last_writes_the_manifest(tmp_path: Path) -> None:
    """In either order; two that see all parts at the same time write the same."""
    state = elastic.State(x=torch.arange(10.0), y=[1, "z"], folder=tmp_path / "one", disk_every=1)
    state.resume()
    state.commit()
    state.close()
    written = newest(tmp_path / "one")
    name = commits.parse_file_name(f"{written.name}/part-0-of-1.distcp")
    assert name is not None
    content = (written / "part-0-of-1.distcp").read_bytes()
    folder = LocalFolder(tmp_path / "two")
    for part in (1, 0):
        of = commits.DiskName(name.commit, part, 2)
        assert commits.folder_name(name.commit) not in {
            path.name for path in (tmp_path / "two").glob("*/.meta*")
        }
        folder.write(commits.file_name(of), lambda: [content])
        manifest.complete(folder, manifest.Maker(), of)
        assert (newest(tmp_path / "two") / ".metadata").exists() == (part == 0)
    first = (newest(tmp_path / "two") / ".metadata").read_bytes()
    manifest.complete(folder, manifest.Maker(), commits.DiskName(name.commit, 1, 2))
    assert (newest(tmp_path / "two") / ".metadata").read_bytes() == first
    facts = manifest.read(first).facts
    assert facts is not None
    assert (facts.number, facts.world_size, facts.bytes_of_parts) == (1, 1, (len(content),) * 2)


def test_a_file_may_get_its_final_name_while_another_rank_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "commit").mkdir()
    unfinished = tmp_path / "commit" / "part-1-of-2.distcp.part"
    unfinished.touch()
    (tmp_path / "commit" / "part-0-of-2.distcp").write_bytes(b"123")
    listed = folder_module._entries

    def and_renamed(path: Path) -> Any:
        entries = listed(path)
        unfinished.rename(unfinished.with_suffix(""))
        return entries

    monkeypatch.setattr(folder_module, "_entries", and_renamed)
    assert LocalFolder(tmp_path).files_in("commit") == {"part-0-of-2.distcp": 3}


def test_nodes_with_folders_of_their_own_resume_together(train: Callable[..., Told], tmp_path: Path) -> None:
    """No rank sees all parts, so there is no manifest; each rank reads its own part."""
    state = {"folder": str(tmp_path / "commits-of-RANK"), "disk_every": 1}
    told = train(2, model="fsdp2", stop=3, epochs=1, state=state)
    assert not list(tmp_path.glob("*/*/.metadata"))
    after = train(2, model="fsdp2", stop=4, epochs=1, state=state)
    assert [line["number"] for line in after.of("resumed")] == [3, 3]
    assert {line["digest"] for line in after.of("resumed")} == {told.digests()[3]}
