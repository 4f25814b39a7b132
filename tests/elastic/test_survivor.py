"""A survivor copies its state while other processes start; in a world of one, whose launcher is played here."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ddp import elastic
from ddp.elastic import keeper, survivor
from ddp.elastic.images import image, kept_images
from ddp.groups import reform
from ddp.telemetry import guard as guards
from ddp.telemetry.guard import Continue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Job:
    """A training that is interrupted in its fourth step, before the optimizer, and goes on."""

    def __init__(self, every: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = elastic.State(model=self.model, optimizer=self.optimizer, step=0, every=every)
        self.is_disturbed = True
        self.losses: list[float] = []
        self.in_step: Callable[[], None] = lambda: None
        self.committed: dict[str, Any] = {}

    def train(self) -> None:
        while self.state.step < 5:
            self.optimizer.zero_grad()
            loss = self.model(torch.rand(3, 4)).square().mean()
            loss.backward()
            self.losses.append(loss.item())
            if self.state.step == 3 and self.is_disturbed:
                self.is_disturbed = False
                self.in_step()
                raise RuntimeError("the connection is closed by the peer")
            self.optimizer.step()
            self.state.step += 1
            self.state.commit()
            if self.state.step == 3:
                self.committed = copy.deepcopy(self.model.state_dict())


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When tensors are copied into commits: before or after the groups are formed anew."""
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("DDP_GENERATION", "1")
    watcher = SimpleNamespace(
        heals=lambda on: None,
        will_pause=lambda within_s: True,
        park=lambda: Continue(2, {"DDP_GENERATION": "2"}),
        go_on=lambda: None,
    )
    monkeypatch.setattr(guards, "start", lambda: watcher)
    found: list[str] = []
    original = keeper._copy

    def noted(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        found.append(forming)
        original(views, tensors)

    def formed(meanwhile: Callable[[], None] = lambda: None) -> None:
        nonlocal forming
        meanwhile()
        forming = "after"

    forming = "before"
    monkeypatch.setattr(keeper, "_copy", noted)
    monkeypatch.setattr(reform, "reform", formed)
    return found


def forms_with(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    formed: Any = reform.reform
    monkeypatch.setattr(reform, "reform", lambda: formed(meanwhile))


def commits_in_memory() -> list[tuple[int, bool]]:
    """The numbers of the commits that can be read, and whether a survivor wrote them."""
    found = []
    for path in kept_images.slots_in(kept_images.folders(os.environ)):
        try:
            head = image.Image(memoryview(kept_images.map_for_reading(path))).head
        except image.DamagedImage:
            continue
        found.append((head.number, head.live))
    return sorted(found)


def test_the_copy_is_made_while_other_processes_start_and_the_step_is_repeated(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    there: list[Any] = []
    forms_with(monkeypatch, lambda: there.append(commits_in_memory()))
    job.state.run(job.train)
    assert copies == ["before"]
    assert there == [[]], "it exists only when all have said where they are"
    assert commits_in_memory() == [(3, True)]
    assert job.losses[3] == job.losses[4]
    assert len(job.losses) == 6
    job.state.close()


def test_the_last_commit_stays_whole_until_the_new_one_is(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(every=2)
    there: list[Any] = []
    forms_with(monkeypatch, lambda: there.append(commits_in_memory()))
    job.state.run(job.train)
    assert there == [[(2, False)]]
    assert job.losses[3] == job.losses[4]
    job.state.close()


def test_a_newer_commit_is_not_copied_again(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(every=1)
    before: list[Any] = []
    job.in_step = lambda: before.append(len(copies))
    there: list[Any] = []
    forms_with(monkeypatch, lambda: there.append((len(copies), commits_in_memory())))
    job.state.run(job.train)
    assert there == [(before[0], [(2, False), (3, False)])]
    assert job.losses[3] == job.losses[4]
    job.state.close()


def assert_copied_when_asked_for(copies: list[str]) -> None:
    job = Job()
    job.state.run(job.train)
    assert copies == ["after"]
    assert job.losses[3] == job.losses[4]
    job.state.close()


def test_a_large_state_is_copied_only_when_it_is_asked_for(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "_MOST_BYTES", 100)
    assert_copied_when_asked_for(copies)


def test_a_copy_ahead_that_fails_is_made_when_it_is_asked_for(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(keeper.Keeper, "copy_live", fails)
    assert_copied_when_asked_for(copies)


def test_parameters_of_low_precision_in_the_interrupted_step_are_not_what_is_kept(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's mixed_precision exchanges them during the forward, and gives them back when the groups are formed anew."""
    job = Job()
    weight: torch.Tensor = job.model[0].weight  # type: ignore[assignment]
    full = weight.data

    def lower() -> None:
        weight.grad = None
        weight.data = full.to(torch.bfloat16)

    def give_back() -> None:
        weight.data = full

    job.in_step = lower
    forms_with(monkeypatch, give_back)
    kept: list[torch.Tensor] = []
    restore = elastic.State._restore

    def restored(self: Any, *args: Any) -> Any:
        found = restore(self, *args)
        kept.append(weight.data.clone())
        return found

    monkeypatch.setattr(elastic.State, "_restore", restored)
    job.state.run(job.train)
    assert copies == ["before", "after"]
    assert torch.equal(kept[0], job.committed["0.weight"])
    assert job.losses[3] == job.losses[4]
    job.state.close()
