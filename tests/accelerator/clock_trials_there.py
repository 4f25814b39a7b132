"""What runs in the ranks of test_device_times.py: what is measured without waiting is the time of the device."""

from __future__ import annotations

from typing import Any

import emu
import torch
from averaging_trials_there import DEVICE, batch, layers, loss_of
from torch import nn

import ddp
from ddp.reducer.device import clock_of
from ddp_launch_wings.diagnostics import bucket_search

SLOW = 0.02
MS = 1_000_000


def steps(model: Any, rank: int, count: int, collectives: float = 0.0) -> list[str]:
    """-> why the host waited."""
    inputs = [batch(rank, step) for step in range(count)]
    torch.accelerator.synchronize()
    emu.take_sync_reasons()
    for x in inputs:
        model.zero_grad()
        with emu.slow(collectives=collectives):
            loss_of(model, x).backward()
    return emu.take_sync_reasons()


def moments(rank: int) -> tuple[bool, bool, int]:
    """-> whether a moment has passed before and after the kernel before it was let go; the time that it took, in ms."""
    clock = clock_of(torch.device(DEVICE))
    x = torch.ones(4, device=DEVICE)
    first = clock.now()
    with emu.slow(kernels=SLOW):
        x = x + 1
    last = clock.now()
    before = clock.has_passed(last)
    took = (clock.nanoseconds(last) - clock.nanoseconds(first)) // MS
    return before, clock.has_passed(last), took


def traced(rank: int, folder: str) -> tuple[list[str], list[int], list[int], str]:
    """-> the waits of three traced steps; the communication of each and its exposed part, in ms; the summary."""
    model = ddp.DistributedDataParallel(layers().to(DEVICE), bucket_cap_mb=0.005)
    steps(model, rank, 4)
    with ddp.trace(model, f"{folder}/steps.json") as timeline:
        waited = steps(model, rank, 3, SLOW)
    for step in timeline.steps:
        assert step.forward_start <= step.backward_start <= step.compute_end <= step.end
        for bucket in step.buckets:
            assert bucket.ready <= bucket.launched <= bucket.done <= step.end
    communication = [step.communication // MS for step in timeline.steps]
    return waited, communication, [step.exposed // MS for step in timeline.steps], timeline.summary


def logged(rank: int) -> tuple[list[str], dict[str, int]]:
    """-> the waits of the first steps, all of which are timed, and what the logging data says in ms."""
    model = ddp.DistributedDataParallel(layers().to(DEVICE), bucket_cap_mb=0.005)
    steps(model, rank, 3)
    waited = steps(model, rank, 3, 5 * SLOW)  # computing takes less, also if it was held up for a moment
    torch.accelerator.synchronize()
    steps(model, rank, 1)  # its forward reads the times
    told = model._get_ddp_logging_data()
    names = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
    return waited, {name: told[name] // MS for name in names}


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 512), *(nn.Linear(512, 512) for _ in range(9)), nn.Linear(512, 4))


def tuned(rank: int) -> tuple[int, int, bool, list[float]]:
    """-> the number of steps, the number in which the host waited, whether the tuner is done, and the gradients."""
    count = 10 + (1 + bucket_search.CANDIDATES) * bucket_search.TURNS * bucket_search.STEPS
    model = ddp.DistributedDataParallel(wide().to(DEVICE), bucket_cap_mb="auto")
    plain = ddp.DistributedDataParallel(wide().to(DEVICE))
    steps(model, rank, 2)
    waited = sum(bool(steps(model, rank, 1)) for _ in range(count))
    steps(plain, rank, 1)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad.cpu())
    return count, waited, model.reducer.core.tuner is None, [float(p.grad.sum()) for p in model.parameters()]
