"""A resume copies the state of optimizers into the tensors that they have, if nobody can tell the difference."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp import elastic
from ddp.elastic.images import copies, leaves


class OwnWay(torch.optim.Adam):
    """It adds what it is given to what it has."""

    def load_state_dict(self, given: Any) -> None:
        held = self.state_dict()["state"]
        for number, slots in given["state"].items():
            for name, value in slots.items():
                held[number][name].zero_().add_(value)


def trained(kind: type[torch.optim.Adam] = torch.optim.Adam) -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    optimizer = kind(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in model.parameters():
        each.grad = torch.rand_like(each)
    optimizer.step()


def tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    _skeleton, found, paths = leaves.disassemble(optimizer.state_dict())
    return dict(zip(paths, found, strict=True))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "commits"


def committed(folder: Path, **named: Any) -> None:
    state = elastic.State(folder=folder, disk_every=1, **named)
    state.resume()
    state.commit()
    state.close()


@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnWay])
def test_an_optimizer_keeps_its_tensors_and_gets_the_values(
    places: Path, kind: type[torch.optim.Adam]
) -> None:
    model, optimizer = trained(kind)
    committed(places, model=model, optimizer=optimizer)
    expected = {path: tensor.clone() for path, tensor in tensors(optimizer).items()}
    step(model, optimizer)
    before = tensors(optimizer)
    assert not torch.equal(before["state.0.exp_avg"], expected["state.0.exp_avg"])
    state = elastic.State(model=model, optimizer=optimizer, folder=places)
    assert state.resume() is not None
    state.close()
    after = tensors(optimizer)
    assert after.keys() == expected.keys()
    for path, tensor in after.items():
        assert tensor is before[path], path
        assert torch.equal(tensor, expected[path]), path
        assert tensor.stride() == expected[path].stride()
    assert not after["state.2.exp_avg"].is_contiguous()


def test_an_optimizer_that_has_nothing_yet_gets_memory_of_its_own(places: Path) -> None:
    model, optimizer = trained()
    committed(places, model=model, optimizer=optimizer)
    fresh = torch.optim.Adam(model.parameters())
    state = elastic.State(model=model, optimizer=fresh, folder=places)
    assert state.resume() is not None
    found = {path: tensor.clone() for path, tensor in tensors(fresh).items()}
    for _commit in range(5):  # the memory of the commit is used again, and the files are removed
        state.commit()
    state.close()
    for path, tensor in tensors(optimizer).items():
        assert torch.equal(found[path], tensor), path
        assert torch.equal(tensors(fresh)[path], tensor), path


def test_a_commit_that_does_not_fit_changes_nothing(places: Path) -> None:
    model, optimizer = trained()
    committed(places, model=model, optimizer=optimizer)
    step(model, optimizer)
    before = {path: tensor.clone() for path, tensor in tensors(optimizer).items()}
    state = elastic.State(optimizer=optimizer, folder=places)
    with pytest.raises(ValueError, match="the commit has the objects"):
        state.resume()
    assert all(torch.equal(tensor, before[path]) for path, tensor in tensors(optimizer).items())


def test_a_model_of_another_size_is_told_which_commit_of_which_folder_does_not_fit(places: Path) -> None:
    model, optimizer = trained()
    committed(places, model=model, optimizer=optimizer)
    state = elastic.State(model=torch.nn.Linear(3, 3), optimizer=optimizer, folder=places)
    with pytest.raises(ValueError, match=rf"(?s)commit 1 of {places} does not fit .*begin anew"):
        state.resume()


@pytest.mark.parametrize(
    ("home", "expected"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(3, 2), False),
        (torch.zeros(2, 3, dtype=torch.float64), False),
        (torch.zeros(3, 2).t(), False),
        (torch.zeros(2, 1).expand(2, 3), False),
    ],
)
def test_only_a_tensor_of_the_same_kind_is_a_home(home: torch.Tensor, expected: bool) -> None:
    leaf = leaves.leaf_of(torch.ones(2, 3), "x")
    assert copies.fits(home, leaf, None) is expected
    with torch.inference_mode():
        assert not copies.fits(torch.zeros(2, 3), leaf, None)


def test_numbers_are_dense_and_what_repeats_itself_is_not() -> None:
    assert leaves.is_dense(leaves.leaf_of(torch.tensor(1.0), "x"))
    assert not leaves.is_dense(leaves.leaf_of(torch.zeros(2, 1).expand(2, 3), "x"))


def test_large_copies_are_whole() -> None:
    tree = {"a": [torch.arange(3 << 20), torch.rand(7, 5).t()]}
    made = copies.owned(tree)
    assert all(
        torch.equal(mine, its) and mine is not its and mine.stride() == its.stride()
        for mine, its in zip(made["a"], tree["a"], strict=True)
    )


def target(descriptor: Path) -> Path | None:
    """What a descriptor of this process stands for; None if it was closed meanwhile."""
    try:
        return descriptor.readlink()
    except OSError:
        return None


def test_a_resume_leaves_nothing_to_the_garbage_collector(places: Path) -> None:
    """Training loops turn it off. The memory of a whole commit would wait for it."""
    model, optimizer = trained()
    committed(places, model=model, optimizer=optimizer)
    gc.collect()
    gc.disable()
    try:
        for _resume in range(3):
            state = elastic.State(model=model, optimizer=optimizer, folder=places)
            assert state.resume() is not None
            state.commit()
            state.close()
            del state
        mapped = Path("/proc/self/maps").read_text()
        opened = [str(each) for each in map(target, Path("/proc/self/fd").iterdir())]
    finally:
        gc.enable()
    assert str(places.parent) not in mapped
    assert not [each for each in opened if each.startswith(str(places.parent))]
