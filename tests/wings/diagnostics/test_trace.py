"""`ddp.trace` and `bucket_cap_mb="auto"`, on real ranks."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from test_training import batch, close, expected, gradients, loss_of, mlp
from torch import nn

import ddp
import ddp.shm
from ddp.elastic import contents
from ddp.groups.core_loading import native
from ddp_launch_wings.diagnostics import bucket_search

if TYPE_CHECKING:
    from pathlib import Path

    from ranks import Ranks

_ENOUGH_STEPS = 10 + (1 + bucket_search.CANDIDATES) * bucket_search.TURNS * bucket_search.STEPS


def steps(wrapped: ddp.DistributedDataParallel, rank: int, count: int) -> None:
    for number in range(count):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, number)).backward()


def traced(rank: int, folder: str, backend: str) -> tuple[int, float, str]:
    ddp.shm.register()
    group = dist.new_group(backend=backend)
    wrapped = ddp.DistributedDataParallel(mlp(), bucket_cap_mb=0.005, process_group=group)
    steps(wrapped, rank, 3)
    with ddp.trace(wrapped, f"{folder}/steps.json") as timeline:
        steps(wrapped, rank, 4)
        with wrapped.no_sync():
            loss_of(wrapped, batch(rank)).backward()
    steps(wrapped, rank, 2)
    close(gradients(wrapped), expected(wrapped.module, 2, 1))
    sender = wrapped.reducer.core.sender
    assert wrapped.reducer.core.operations is sender
    for step in timeline.steps:
        assert step.forward_start < step.backward_start < step.compute_end <= step.end
        assert len(step.buckets) == len(sender.plan.buckets) > 1
        assert sum(bucket.nbytes for bucket in step.buckets) == sum(one.nbytes for one in sender.facts)
        for bucket in step.buckets:
            assert step.backward_start < bucket.ready <= bucket.launched <= bucket.done <= step.end
    return len(timeline.steps), timeline.hidden, timeline.summary


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("shm", marks=pytest.mark.skipif(native() is None, reason="no compiled core"))],
)
def test_a_trace_tells_of_every_averaged_step(two_ranks: Ranks, tmp_path: Path, backend: str) -> None:
    for rank, (count, hidden, summary) in enumerate(two_ranks(traced, str(tmp_path), backend)):
        assert count == 4
        assert 0 <= hidden <= 1
        assert summary.startswith("4 steps: forward")
        written = json.loads((tmp_path / f"steps.rank{rank}.json").read_text())
        events = written["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert sum(event["name"] == "backward" for event in events) == 4
        assert written["otherData"]["summary"] == summary


def traced_by_one(rank: int) -> int:
    """A trace within a trace, which ends first or last, on one rank only."""
    wrapped = ddp.DistributedDataParallel(mlp(), bucket_cap_mb="auto")
    if rank == 0:
        outer = ddp.trace(wrapped)
        seen = outer.__enter__()
    steps(wrapped, rank, 4)
    if rank == 0:
        with ddp.trace(wrapped) as inner:
            steps(wrapped, rank, 1)
            outer.__exit__(None, None, None)
            steps(wrapped, rank, 1)
        assert (len(seen.steps), len(inner.steps)) == (5, 2)
    else:
        steps(wrapped, rank, 2)
    steps(wrapped, rank, _ENOUGH_STEPS)
    assert wrapped.reducer.core.operations is wrapped.reducer.core.sender
    return len(wrapped.reducer.core.sender.plan.buckets)


def test_traces_do_not_disturb_each_other_nor_other_ranks(two_ranks: Ranks) -> None:
    one, other = two_ranks(traced_by_one)
    assert one == other


def test_only_our_module_can_be_traced() -> None:
    with pytest.raises(TypeError, match=r"ddp\.trace .* Linear"), ddp.trace(nn.Linear(2, 2)):
        pass


# --- bucket_cap_mb="auto" ----------------------------------------------------------------------------


def wide() -> nn.Module:
    """9 MiB: several sizes make different buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), *(nn.Linear(512, 512) for _ in range(9)), nn.Linear(512, 4))


def tuned(rank: int, given: dict[str, Any]) -> tuple[list[Any], list[str]]:
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddp")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    wrapped = ddp.DistributedDataParallel(wide(), bucket_cap_mb="auto", **given)
    plain = ddp.DistributedDataParallel(wide())
    for number in range(_ENOUGH_STEPS):
        is_compared = number % 4 == 0  # among them steps with each of the sizes
        for model in (wrapped, plain) if is_compared else (wrapped,):
            model.zero_grad(set_to_none=number % 3 > 0)
            model(torch.full((2, 8), rank + number / 100)).square().mean().backward()
        if is_compared:
            close(gradients(wrapped), gradients(plain))
    log.removeHandler(listener)
    assert wrapped.reducer.core.tuner is None
    members = [bucket.members for bucket in wrapped.reducer.core.sender.plan.buckets]
    assert members == of_a_job_that_goes_on(wrapped, given)
    return members, said


def of_a_job_that_goes_on(wrapped: ddp.DistributedDataParallel, given: dict[str, Any]) -> list[Any]:
    """A State keeps the buckets. So another model does not search, also after it was reset."""
    again = ddp.DistributedDataParallel(wide(), bucket_cap_mb="auto", **given)
    kept = contents.bucket_plans_of({"model": wrapped})
    assert contents.bucket_plans_of({"model": again}) == {}
    contents.restore_bucket_plans({"model": again}, kept)
    core = again.reducer.core
    assert core.tuner is None
    for _step in range(3):
        again(torch.ones(2, 8)).square().mean().backward()
    assert contents.bucket_plans_of({"model": again}) == kept
    return [bucket.members for bucket in core.sender.plan.buckets]


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.nightly),
        pytest.param({"static_graph": True}, marks=pytest.mark.nightly),
    ],
)
def test_auto_tries_sizes_and_all_ranks_keep_the_same(two_ranks: Ranks, given: dict[str, Any]) -> None:
    (one, said), (other, silent) = two_ranks(tuned, given)
    assert one == other
    assert [text for text in said if "auto" in text]
    assert not [text for text in silent if "auto" in text]


def stands_off(rank: int) -> list[str]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooked = ddp.DistributedDataParallel(mlp(), bucket_cap_mb="auto")
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    joining = ddp.DistributedDataParallel(mlp(), bucket_cap_mb="auto")
    looking = ddp.DistributedDataParallel(mlp(), bucket_cap_mb="auto", find_unused_parameters=True)
    steps(hooked, rank, 12)
    steps(looking, rank, 12)
    with joining.join():
        steps(joining, rank, 12 * rank)
    steps(joining, rank, 12)
    close(gradients(joining), expected(joining.module, 2, 11))
    wrapped = {"hooked": hooked, "joining": joining, "looking": looking}
    return [name for name, model in wrapped.items() if model.reducer.core.tuner is not None]


def test_auto_stands_off_where_buckets_are_the_business_of_others(two_ranks: Ranks) -> None:
    assert two_ranks(stands_off) == [[], []]


def misused(rank: int) -> list[str]:
    said = []
    for given in ({"bucket_cap_mb": "large"}, {"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1, 2]}):
        with pytest.raises(ValueError, match="bucket_cap_mb") as error:
            ddp.DistributedDataParallel(mlp(), **given)
        said.append(str(error.value))
    with pytest.raises(RuntimeError, match="bucket_cap_mb") as different:
        ddp.DistributedDataParallel(mlp(), bucket_cap_mb="auto" if rank else 25)
    return [*said, str(different.value)]


def test_misuse_of_auto_is_told(two_ranks: Ranks) -> None:
    large, both, different = two_ranks(misused)[0]
    assert "'large'" in large
    assert "bucket_cap_mb_list" in both
    assert "auto on rank 1" in different
