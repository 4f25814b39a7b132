"""A mark of a commit() call: what the objects do not hold any more in the next step comes back."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ddp.elastic.generators import NumpyGenerator, PythonGenerator
from ddp.elastic.survivor import Live, drop_gradients


def training() -> tuple[dict[str, object], dict[str, object]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, {"step": 0, "seen": [1]}


def forward(objects: dict[str, object]) -> torch.Tensor:
    return objects["model"](torch.ones(3, 4) + torch.rand(3, 4)).sum()  # type: ignore[operator]


def test_a_step_that_was_interrupted_before_the_optimizer_is_repeated_to_the_last_bit() -> None:
    objects, fields = training()
    objects["optimizer"].step()  # type: ignore[attr-defined]
    live = Live(objects, fields)
    live.mark(5)
    first = forward(objects)
    first.backward()
    drawn = random.random()
    fields["seen"].append(2)  # type: ignore[attr-defined]
    fields["step"] = 1
    objects["scheduler"].step()  # type: ignore[attr-defined]
    assert live.number == 5
    live.restore()
    drop_gradients(objects)
    assert fields == {"step": 0, "seen": [1]}
    assert objects["optimizer"].param_groups[0]["lr"] == 0.1  # type: ignore[attr-defined]
    assert all(each.grad is None for each in objects["model"].parameters())  # type: ignore[attr-defined]
    assert torch.equal(forward(objects), first)
    assert random.random() == drawn


def test_after_a_step_of_the_optimizer_the_mark_is_no_state_any_more() -> None:
    objects, fields = training()
    live = Live(objects, fields)
    assert live.number is None
    live.mark(5)
    objects["optimizer"].step()  # type: ignore[attr-defined]
    assert live.number is None
    live.mark(6)
    assert live.number == 6
    live.end()
    live.mark(7)
    objects["optimizer"].step()  # type: ignore[attr-defined]
    assert live.number == 7, "it still watches"


def drawn_by_python() -> list[float]:
    return [random.gauss(0, 1), *(random.random() for _ in range(700))]


@pytest.mark.parametrize("pending", [False, True])
def test_pythons_generator_comes_back_from_the_copy_of_its_memory(pending: bool) -> None:
    random.seed(3)
    if pending:
        random.gauss(0, 1)  # the next call returns the second number of the pair
    generator = PythonGenerator()
    held = generator.state()
    assert generator._block, "this interpreter keeps the words elsewhere: a mark takes longer"
    first, state = drawn_by_python(), random.getstate()
    generator.set(held)
    assert drawn_by_python() == first
    assert random.getstate() == state


def test_pythons_generator_of_another_kind_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type("Other", (random.Random,), {})(5)
    for name in ("getstate", "setstate", "random", "gauss"):
        monkeypatch.setattr(random, name, getattr(other, name))
    generator = PythonGenerator()
    held = generator.state()
    assert not generator._block
    first = drawn_by_python()
    generator.set(held)
    assert drawn_by_python() == first


def test_numpys_generator_is_asked_only_if_it_has_changed() -> None:
    numpy_random = pytest.importorskip("numpy").random
    if not hasattr(numpy_random, "get_bit_generator"):
        pytest.skip("an old NumPy is always asked")
    numpy_random.seed(3)
    generator = NumpyGenerator()
    before = generator.state(numpy_random)
    assert generator.state(numpy_random) is before
    for draw in (numpy_random.rand, numpy_random.standard_normal, lambda: numpy_random.seed(4)):
        draw()
        for _ in range(2):
            state = generator.state(numpy_random)
            assert str(state) == str(numpy_random.get_state(legacy=False))
    numpy_random.seed(3)
    numpy_random.standard_normal()
    pending = generator.state(numpy_random)
    assert pending["has_gauss"]
    numpy_random.standard_normal()  # the block stays as it is
    assert not generator.state(numpy_random)["has_gauss"]


def test_numpys_generator_of_another_kind_is_asked() -> None:
    numpy_random = pytest.importorskip("numpy").random
    if not hasattr(numpy_random, "set_bit_generator"):
        pytest.skip("an old NumPy has one kind only")
    kept = numpy_random.get_bit_generator()
    generator = NumpyGenerator()
    generator.state(numpy_random)
    try:
        numpy_random.set_bit_generator(numpy_random.PCG64(1))
        first = generator.state(numpy_random)
        numpy_random.rand()
        assert first["bit_generator"] == "PCG64"
        assert generator.state(numpy_random)["state"] != first["state"]
    finally:
        numpy_random.set_bit_generator(kept)
    assert generator.state(numpy_random)["bit_generator"] == kept.state["bit_generator"]


def test_buffers_are_those_that_torch_lists_also_after_a_module_was_exchanged() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    model = nn.ModuleDict({"a": inner, "b": nn.Linear(4, 4), "again": inner})
    model.register_buffer("empty", None)
    live = Live({"model": model}, {})
    for _ in range(2):
        live.mark(1)
        assert live._mark is not None
        assert {id(buffer) for buffer, _kept in live._mark.buffers} == set(map(id, model.buffers()))
        model["a"] = nn.BatchNorm2d(3)
