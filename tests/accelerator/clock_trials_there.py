"""What runs in the ranks of test_device_times.py: what is measured without waiting is the time of the device."""

from __future__ import annotations

from typing import Any

import emu
import torch
from averaging_trials_there import DEVICE, batch, layers, loss_of

import ddp
from ddp.reducer.device import clock_of

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
