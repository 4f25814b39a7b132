"""What a training uses and its State does not have is named at the first commits."""

from __future__ import annotations

import logging
import sys
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddp.elastic import ElasticSampler, State, forgotten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def state() -> Iterator[Any]:
    opened: list[State] = []

    def make(**named: Any) -> State:
        opened.append(State(**named))
        opened[-1].resume()
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def trained(*optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        for group in each.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        each.step()


def test_objects_that_were_used_are_named(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    critics_optimizer = torch.optim.Adam(critic.parameters())
    idle = torch.optim.Adam(torch.nn.Linear(1, 1).parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sampler = ElasticSampler(range(10))
    average = torch.optim.swa_utils.AveragedModel(model)
    trained(optimizer, critics_optimizer)
    schedule.step()
    average.update_parameters(model)
    it = state(model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING):
        it.commit()
    (said,) = [each.getMessage() for each in caplog.records if "not in the State" in each.getMessage()]
    assert "critics_optimizer (Adam)" in said
    for name in ("schedule (StepLR)", "sampler (ElasticSampler)", "average (AveragedModel)"):
        assert name in said
    assert "idle" not in said
    assert " optimizer (Adam)" not in said
    assert len(idle.state) == 0
    assert sampler is not None


def test_nothing_is_said_if_all_is_kept(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)], milestones=[3]
    )
    trained(optimizer)
    schedule.step()
    it = state(model=torch.nn.Sequential(model), optimizer=optimizer, schedule=schedule, step=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            it.step += 1
            it.commit()
    assert not caplog.records


def test_an_average_of_the_weights_is_found_if_it_changes(
    state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Average:
        def __init__(self, model: torch.nn.Module) -> None:
            self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = state(model=model, optimizer=optimizer)
    own, copy, constant = Average(model), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    unwrapped, ops = (
        torch.nn.Sequential(model),
        torch.distributed,
    )  # it has an object that warns when it is looked at
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        for _ in range(4):
            trained(optimizer)
            for name, each in model.named_parameters():
                own.shadow[name] = 0.9 * own.shadow[name] + 0.1 * each.detach()
            with torch.no_grad():
                copy.weight.lerp_(model.weight, 0.1)
            elastic.commit()
    assert [constant, unwrapped, ops]
    (said,) = [each.getMessage() for each in caplog.records if "sets it back" in each.getMessage()]
    assert "sets it back: copy (Linear), own (Average)." in said


def looked_at(frames: Any, **fields: Any) -> list[str]:
    variables, lost = forgotten.CarriedVariables(), []
    for _ in frames(lambda: lost.extend(variables.look(sys._getframe(1), fields)), fields):
        if variables.is_over:
            break
    return [each.partition(" ")[0] for each in lost]


def test_variables_that_carry_something_from_step_to_step() -> None:
    def train(commit: Any, fields: dict[str, Any]) -> Iterator[None]:
        total, best, losses, seen, constant = 0.0, 9.0, [], {}, [1]
        step = fields["step"]
        for epoch in range(2):
            inside = 100
            for batch in range(4):
                loss = float(batch + epoch)
                total += loss
                if loss < best:
                    best = loss
                best = best - 1
                losses.append(loss)
                seen[batch, epoch] = constant[0]
                inside += 1
                step += 1
                fields["step"] = step
                commit()
                yield

    assert looked_at(train, step=0) == ["best", "inside", "losses", "seen", "total"]


def test_a_while_loop_is_a_loop() -> None:
    """Python 3.11 ends it with a conditional jump."""

    def train(commit: Any, fields: dict[str, Any]) -> Iterator[None]:
        running = 0.0
        while fields["step"] < 9:
            running = 0.9 * running + fields["step"]
            fields["step"] += 1
            commit()
            yield

    assert looked_at(train, step=0) == ["running"]


def test_files_that_ranks_have_read_in_other_versions() -> None:
    assert forgotten.differing([{"a.py": 1, "b.py": 2}, {"a.py": 1}, {"a.py": 3, "b.py": 2}]) == ["a.py"]
    assert forgotten.differing([{"a.py": 1}, {"c.py": 1}, {}]) == []


def test_code_that_is_not_in_the_file_any_more_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited_module.py"
    file.write_text("class Net:\n    def step(self):\n        return [x + 1 for x in ()]\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("edited_module")
    checksum = forgotten._checksum(file, 0.0)
    assert checksum == zlib.crc32(file.read_bytes())
    file.write_text(file.read_text().replace("+ 1", "+ 2"))
    assert forgotten._checksum(file, 0.0) != zlib.crc32(file.read_bytes())
    assert forgotten._checksum(file, file.stat().st_mtime) == zlib.crc32(file.read_bytes()), "an old file"
    assert forgotten._began_at() < file.stat().st_mtime
