"""`python -m ddp.elastic`: what we have saved can be looked at and taken away."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_other_programs import OLD, own_memory, trained

from ddp import elastic
from ddp_launch_wings.inspection import elastic_command as command

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["own_memory"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a commit of 0.1.0, and two of today."""
    path = tmp_path / "commits"
    shutil.copytree(OLD, path)
    model, optimizer = trained(2)
    state = elastic.State(net=model, optimizer=optimizer, step=5, folder=path, disk_every=1, keep=9)
    with pytest.raises(ValueError, match="the commit has the objects"):
        state.resume()
    shutil.move(path, tmp_path / "aside")
    state.resume()
    state._number = 8
    for _step in range(2):
        state.commit()
    state.close()
    shutil.copytree(tmp_path / "aside", path, dirs_exist_ok=True)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = command.main(list(map(str, words)))
    said = capsys.readouterr()
    return code, said.out + said.err


def test_ls_and_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "ls", folder)
    assert code == 0
    rows = [line.split() for line in said.splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [("2", "complete"), ("9", "complete"), ("10", "complete")]
    assert run(capsys, "verify", folder) == (0, said.replace("complete", "ok"))
    without_torch = f"import sys; sys.modules['torch'] = None; sys.argv = ['', 'ls', {str(folder)!r}]"
    run_module = "import runpy; runpy.run_module('ddp.elastic', run_name='__main__')"
    listed = subprocess.run(
        [sys.executable, "-c", f"{without_torch}; {run_module}"], capture_output=True, text=True, check=False
    )
    assert (listed.returncode, listed.stdout) == (0, said), listed.stderr
    newest, older = sorted(folder.glob("*/.metadata"), reverse=True)
    data = bytearray(newest.read_bytes())
    data[100] ^= 1
    newest.write_bytes(data)
    part = older.with_name("part-0-of-1.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    code, said = run(capsys, "verify", folder)
    assert code == 1
    assert f"{newest.parent.name}/.metadata: wrong checksum of the manifest" in said
    assert f"{part.parent.name}/part-0-of-1.distcp: truncated" in said
    part.unlink()
    code, said = run(capsys, "ls", folder)
    assert "incomplete: 0 of 1 parts" in said


def test_ls_and_verify_of_one_commit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_all = run(capsys, "verify", folder)[1].splitlines()
    one = max(folder.glob("commit-*9-*"))
    for name in (str(one), f"{one}/", f"file://{one}"):
        assert run(capsys, "verify", name) == (0, of_all[1] + "\n")
    (one / "part-0-of-1.distcp").unlink()
    assert run(capsys, "verify", one)[0] == 1


def test_bad_input_is_one_line_with_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, target = tmp_path / "empty", tmp_path / "x.safetensors"
    empty.mkdir()
    (tmp_path / "file").write_text("no commit")
    (tmp_path / "scoped").mkdir()
    shutil.copytree(folder, tmp_path / "scoped" / "stage0")
    damaged = tmp_path / "damaged" / max(folder.glob("commit-*-*")).name
    shutil.copytree(folder / damaged.name, damaged)
    data = bytearray((damaged / ".metadata").read_bytes())
    data[50] ^= 1
    (damaged / ".metadata").write_bytes(data)
    unfinished = tmp_path / "unfinished" / damaged.name
    shutil.copytree(damaged, unfinished, ignore=shutil.ignore_patterns(".metadata"))
    for words, expected in (
        (("ls", tmp_path / "nowhere"), "nowhere does not exist"),
        (("ls", tmp_path / "file"), "file is a file. Name the folder of the commits"),
        (("ls", ""), "the name of the folder is empty"),
        (("ls", folder / "commit-0000000099-abc"), f"no commit commit-0000000099-abc in {folder}. It has 3"),
        (
            ("verify", empty / "commit-0000000099-abc"),
            f"no commit commit-0000000099-abc in {empty}. It has none",
        ),
        (("verify", empty), f"{empty}: there are no commits"),
        (("verify", tmp_path / "scoped"), "no commits, but in its folders stage0: name one of them"),
        (("ls", "nowhere://x"), "invalid folder='nowhere://x'"),
        (("export", tmp_path / "nowhere", target), "nowhere does not exist"),
        (("export", tmp_path / "file", target), "file is a file"),
        (("export", unfinished.parent, target), "none of its 1 commits is complete and has a .metadata"),
        (("export", empty, target), "it is not a checkpoint"),
        (("export", damaged, target), f"cannot read .metadata in {damaged}: wrong checksum of the manifest"),
        (("export", damaged.parent, target), "wrong checksum of the manifest"),
        (("export", folder, tmp_path), f"cannot write {tmp_path}: it is a folder"),
        (("export", folder, empty / "no" / "x"), "in a folder that does not exist"),
        (
            ("export", folder, target, "--name", "ne"),
            "has no tensors of 'ne'. It has those of net, optimizer",
        ),
    ):
        code, said = run(capsys, *words)
        assert (code, said.count("\n")) == (2, 1), said
        assert said.startswith("python -m ddp.elastic: "), said
        assert expected in said, said
    assert run(capsys, "ls", empty) == (0, f"{empty}: there are no commits\n")
    assert not target.exists()
    assert not list(tmp_path.glob("*.part"))


def test_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    target = tmp_path / "model.safetensors"
    model, optimizer = trained(2)
    assert run(capsys, "export", folder, target, "--name", "net") == (0, f"wrote 9 tensors to {target}\n")
    found = load_file(target)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], each) for name, each in model.state_dict().items())
    assert run(capsys, "export", max(folder.glob("commit-*9-*")), target)[0] == 0
    found = load_file(target)
    assert torch.equal(found["net.0.weight"], model[0].weight)  # type: ignore[index]
    assert torch.equal(
        found["optimizer.state.0.weight.exp_avg"],
        optimizer.state[model[0].weight]["exp_avg"],  # type: ignore[index]
    )
    code, said = run(capsys, "export", folder, target, "--name", "model")
    assert (code, "has no tensors of 'model'. It has those of net, optimizer" in said) == (2, True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64]
)
def test_types_of_safetensors(dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    tensors = {
        "x": torch.arange(12).to(dtype).view(3, 4),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "theirs")
    assert run(capsys, "export", tmp_path / "theirs", tmp_path / "x.safetensors")[0] == 0
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, each in tensors.items():
            assert file.get_tensor(name).dtype == each.dtype
            assert file.get_tensor(name).tolist() == each.tolist()


def test_help_names_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddp.elastic", "--help"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert all(f"\n    {name} " in done.stdout for name in ("ls", "verify", "export")), done.stdout
