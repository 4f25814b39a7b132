"""What others have saved is read, and what we have saved can be looked at and taken away."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from ddp import elastic
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


def test_regions_of_a_checkpoint(tmp_path: Path) -> None:
    dcp.save({"x": torch.arange(20.0).view(4, 5)}, checkpoint_id=tmp_path / "theirs")
    found = Checkpoint(tmp_path / "theirs").tensor("x", ((1, 2), (3, 2)))
    assert found.tolist() == [[8.0, 9.0], [13.0, 14.0]]
