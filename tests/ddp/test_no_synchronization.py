"""A step reads no tensor on the host: on an accelerator each read would wait for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from host_reads import host_reads
from test_training import batch, loss_of, mlp
from torch import nn

import ddp
from ddp.telemetry import capture, collective_marks

if TYPE_CHECKING:
    import pytest
    from ranks import Ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.005},
    "as views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}
_WARM = 4


def reads_per_step(model: Any, rank: int, steps: int = _WARM + 3) -> list[list[str]]:
    found = []
    for step in range(steps):
        model.zero_grad()
        x = batch(rank, step)
        with host_reads() as reads:
            loss_of(model, x).backward()
        found.append(reads)
    return found[_WARM:]


def steps_with_options(rank: int) -> dict[str, list[list[str]]]:
    return {
        name: reads_per_step(ddp.DistributedDataParallel(mlp(), **given), rank)
        for name, given in OPTIONS.items()
    }


def test_a_step_reads_nothing(two_ranks: Ranks) -> None:
    for found in two_ranks(steps_with_options):
        assert found == {name: [[], [], []] for name in OPTIONS}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.one, self.other = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        out: torch.Tensor = self.one(x) if self.takes_one else self.other(x)
        return out

    takes_one = True


def branching(rank: int, alike: bool) -> tuple[list[list[str]], list[bool]]:
    torch.manual_seed(0)
    model = ddp.DistributedDataParallel(Branches(), find_unused_parameters=True)
    model.module.takes_one = alike or rank == 0
    return reads_per_step(model, rank), [p.grad is not None for p in model.parameters()]


def test_the_map_of_used_parameters_is_read_once_and_only_by_a_rank_that_did_not_use_one(
    two_ranks: Ranks,
) -> None:
    for reads, has_gradient in two_ranks(branching, True):
        assert reads == [["tolist"]] * 3
        assert has_gradient == [True, True, True, True, False, False]
    for reads, has_gradient in two_ranks(branching, False):
        assert reads == [["tolist"]] * 3
        assert all(has_gradient)


# --- ddp.check_numerics ------------------------------------------------------------------------------


def checked(rank: int, at_once: bool) -> tuple[list[int], list[str], str]:
    """-> the reads of each step, what each step raised, and what the end raised. Rank 1 has a NaN in step 3."""
    model = ddp.DistributedDataParallel(mlp())
    check = ddp.check_numerics(model, at_once=at_once, replicas_every=2)
    reads, raised = [], []
    for step in range(1, 7):
        model.zero_grad()
        x = batch(rank, step) * (float("nan") if (rank, step) == (1, 3) else 1.0)
        with host_reads() as seen:
            loss = loss_of(model, x)
            try:
                loss.backward()
                raised.append("")
            except ddp.NumericsError as error:
                raised.append(str(error))
        reads.append(len([each for each in seen if each == "tolist"]))
    loss_of(model, batch(rank)).backward()
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    try:
        loss_of(model, batch(rank)).backward()
        raised.append("")
    except ddp.NumericsError as error:
        raised.append(str(error))
    try:
        check.end()
    except ddp.NumericsError as error:
        return reads, raised, str(error)
    return reads, raised, ""


def test_the_result_of_a_step_can_be_read_in_the_next_one(two_ranks: Ranks) -> None:
    one, other = two_ranks(checked, False)
    assert one[1:] == other[1:]
    reads, raised, at_the_end = one
    assert reads[0] == 0  # nothing of its own step
    assert [bool(text) for text in raised] == [False, False, False, True, False, False, False]
    assert "in step 3 " in raised[3]
    assert "rank 1 has NaN" in raised[3]
    assert "the replicas differ after step 8" in at_the_end


def test_at_once_raises_in_the_same_step(two_ranks: Ranks) -> None:
    (_, raised, at_the_end), other = two_ranks(checked, True)
    assert raised == other[1]
    assert [bool(text) for text in raised] == [False, False, True, False, False, False, True]
    assert "rank 1 has NaN" in raised[2]
    assert "the replicas differ after step 8" in raised[6]
    assert at_the_end == ""


def scaled(rank: int, scale: float) -> list[str]:
    """Rank 1 overflows in step 2; the scaler lowers its scale after that step, before the result is read."""
    model = ddp.DistributedDataParallel(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp.check_numerics(model, scaler=scaler, at_once=False)
    raised = []
    for step in range(1, 5):
        optimizer.zero_grad()
        x = batch(rank, step) * (float("inf") if (rank, step) == (1, 2) else 1.0)
        raised.append("")
        try:
            scaler.scale(loss_of(model, x)).backward()
        except ddp.NumericsError as error:
            raised[-1] = str(error)
        scaler.step(optimizer)
        scaler.update()
    return raised


def test_the_scale_that_counts_is_that_of_the_step(two_ranks: Ranks) -> None:
    assert two_ranks(scaled, 2.0) == [[""] * 4] * 2
    one, other = two_ranks(scaled, 1.0)
    assert one == other
    assert [bool(text) for text in one] == [False, False, True, False]


# --- during the capture of a graph ---------------------------------------------------------------------


class NotDone:
    """Work that is captured: to ask it anything is an error."""

    def is_completed(self) -> bool:
        raise AssertionError("CUDA error: operation not permitted when stream is capturing")


class Noting:
    def __init__(self) -> None:
        self.entered = 0
        self.left = 0

    def enter(self, *_facts: object) -> int:
        self.entered += 1
        return self.entered

    def leave(self, _ticket: int) -> None:
        self.left += 1

    def group(self, *_facts: object) -> int:
        return 0

    def mark(self, _phase: int) -> int:
        return 0

    def back(self, _phase: int) -> None:
        pass


class Group:
    group_name = "made here"

    def size(self) -> int:
        return 1

    def allreduce(self, _tensors: object, _options: object = None) -> NotDone:
        return NotDone()


def test_a_device_that_is_not_in_use_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch with CUDA on a machine without a driver: collectives over Gloo have to work."""

    def fail() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    capture._questions.cache_clear()
    assert not capture.is_capturing()
    capture._questions.cache_clear()


def test_work_is_never_queried() -> None:
    class Watched(Group):
        allreduce = Group.allreduce

    page = Noting()
    marks = collective_marks._Marks(page)  # type: ignore[arg-type]
    marks.watch_group_class(Watched)
    group = Watched()
    kept = [group.allreduce([torch.ones(1)]) for _ in range(3)]
    assert (page.entered, page.left) == (3, 0)
    kept.clear()
    assert page.left == 3
