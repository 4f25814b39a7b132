"""What others have saved is read, and what we have saved can be looked at and taken away."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from ddp import elastic
from ddp.elastic import __main__ as command
from ddp.elastic.files.checkpoint import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Told

OLD = Path(__file__).parent.parent / "released" / "commits"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))


def trained(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": seed / 8},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ],
        lr=seed / 4,
    )
    for _step in range(seed):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(
    one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]
) -> bool:
    first, second = ((model.state_dict(), optimizer.state_dict()) for model, optimizer in (one, other))
    return repr(first) == repr(second)


# As the programs save; their sources say so.
def plain(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """A script that gives its state dictionaries to DCP."""
    dcp.save({"net": model.state_dict(), "opt": optimizer.state_dict(), "step": 7}, checkpoint_id=path)


def torchs_recipe(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """torch's tutorial: parameters by name."""
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    dcp.save({"app": {"model": of_model, "optim": of_optimizer}, "step": 7}, checkpoint_id=path)


def torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The tensors of the model without a prefix, and a flat optimizer."""
    options = states.StateDictOptions(flatten_optimizer_state_dict=True)
    flat = states.get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save(
        model.state_dict() | {"optimizer": flat, "step": 7, "train_state": {"step": 7}}, checkpoint_id=path
    )


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Its strategies for sharded models: `optimizer_0`, and all else in meta.pt."""
    of_optimizer = states.get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": states.get_model_state_dict(model), "optimizer_0": of_optimizer}, checkpoint_id=path)
    torch.save({"epoch": 3}, path / "meta.pt")


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, number: int = 0) -> None:
    """A checkpoint for the model, and one for each optimizer: by accelerate itself."""
    import accelerate.utils as theirs
    from accelerate import PartialState

    PartialState(cpu=True)  # its logger asks for one
    plugin = theirs.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    theirs.save_fsdp_model(plugin, None, model, path, number)
    theirs.save_fsdp_optimizer(plugin, None, optimizer, model, path, number)
    PartialState._reset_state()


@pytest.mark.parametrize("save", [plain, torchs_recipe, torchtitan, lightning, accelerate])
def test_a_job_begins_from_what_another_program_has_saved(
    save: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, here = trained(2), trained(1)
    save(*there, tmp_path / "theirs")
    options: dict[str, Any] = {"folder": tmp_path / "ours", "start_from": tmp_path / "theirs"}
    state = elastic.State(model=here[0], optimizer=here[1], step=0, unknown=5, **options)
    assert state.resume() is None
    assert same(here, there)
    has_step = save not in (lightning, accelerate)
    assert (state.step, state.unknown) == (7 if has_step else 0, 5)
    assert f"has no {'unknown' if has_step else 'step, unknown'}; these stay" in caplog.text
    state.step = 8
    state.checkpoint()
    state.close()
    again = elastic.State(model=here[0], optimizer=here[1], step=0, unknown=5, **options)
    assert again.resume() is not None, "a commit comes before the checkpoint to begin with"
    assert again.step == 8
    again.close()


@pytest.mark.parametrize("model", ["fsdp2", pytest.param("torch", marks=pytest.mark.nightly)])
def test_it_begins_in_another_sharding(train: Callable[..., Told], tmp_path: Path, model: str) -> None:
    state = {"folder": str(tmp_path / "commits"), "disk_every": 1}
    told = train(2, model="fsdp2", stop=2, epochs=1, state=state)
    (newest,) = (
        path for path in (tmp_path / "commits").iterdir() if path.name.startswith("commit-0000000002")
    )
    after = train(3, model=model, stop=3, epochs=1, state={"start_from": str(newest)})
    assert {line["digest"] for line in after.of("began")} == {told.digests()[2]}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    plain(*trained(1), tmp_path / "theirs")
    larger = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(
        CheckpointError, match=r"the shape of net.0.weight is \(4, 3\) there, but \(5, 3\) here"
    ):
        elastic.State(model=larger, start_from=tmp_path / "theirs").resume()
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match=r"lacks 2 of its 4 tensors, for example 3.weight"):
        elastic.State(model=layers, start_from=tmp_path / "theirs").resume()
    with pytest.raises(CheckpointError, match=r"it is not a checkpoint"):
        elastic.State(model=larger, start_from=tmp_path / "nowhere").resume()


def test_two_models_of_accelerate_are_not_mixed_up(tmp_path: Path) -> None:
    for number in (0, 1):
        accelerate(*trained(number + 1), tmp_path, number)
    model, optimizer = trained(3)
    with pytest.raises(CheckpointError, match=r"has optimizer\.\S+ more than once, also in optimizer_1"):
        elastic.State(model=model, optimizer=optimizer, start_from=tmp_path).resume()
    elastic.State(model=model, start_from=tmp_path / "pytorch_model_fsdp_1").resume()
    assert torch.equal(model.state_dict()["0.weight"], trained(2)[0].state_dict()["0.weight"])


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("ran").touch, ())


def test_values_are_read_without_executing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.dumps(Malicious())
    dcp.save({"step": Malicious()}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="without executing code"):
        elastic.State(step=0, start_from=tmp_path / "theirs").resume()
    assert not Path("ran").exists()


# --- python -m ddp.elastic ---------------------------------------------------------------------------


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


def test_regions_of_a_checkpoint(tmp_path: Path) -> None:
    dcp.save({"x": torch.arange(20.0).view(4, 5)}, checkpoint_id=tmp_path / "theirs")
    found = Checkpoint(tmp_path / "theirs").tensor("x", ((1, 2), (3, 2)))
    assert found.tolist() == [[8.0, 9.0], [13.0, 14.0]]


def test_help_names_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddp.elastic", "--help"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert all(f"\n    {name} " in done.stdout for name in ("ls", "verify", "export")), json.dumps(
        done.stdout
    )
