"""What runs in the ranks of test_waiting.py: steps in which nothing may wait for the device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import emu
import torch
from averaging_trials_there import DEVICE, batch, branches, layers, loss_of
from torch import nn

import ddp
from ddp.telemetry import capture

if TYPE_CHECKING:
    from collections.abc import Iterator

_WARM = 4


def waits(model: Any, rank: int, steps: int = 2) -> list[str]:
    """The reasons for which the host waited, in steps on slow collectives after some others."""
    inputs = [batch(rank, step) for step in range(_WARM + steps)]
    for step, x in enumerate(inputs):
        if step == _WARM:
            torch.accelerator.synchronize()
            emu.take_sync_reasons()
        model.zero_grad()
        with emu.slow(collectives=0.02 if step >= _WARM else 0.0):
            loss_of(model, x).backward()
    return emu.take_sync_reasons()


def looking_for_unused(rank: int, unused: bool) -> list[str]:
    model = ddp.DistributedDataParallel(
        (branches() if unused else layers()).to(DEVICE), find_unused_parameters=True, bucket_cap_mb=0.005
    )
    return waits(model, rank, 1)


def checked(rank: int) -> tuple[list[str], str]:
    """-> the waits of a step with a NaN on rank 1 and of the next one, which comes later, and what that one raised."""
    model = ddp.DistributedDataParallel(layers().to(DEVICE))
    with ddp.check_numerics(model, replicas_every=2):
        waited = waits(model, rank, 1)
        torch.accelerator.synchronize()
        model.zero_grad()
        bad = batch(rank, 9) * (float("nan") if rank else 1.0)
        emu.take_sync_reasons()
        with emu.slow(collectives=0.02):
            loss_of(model, bad).backward()
        waited += emu.take_sync_reasons()
        torch.accelerator.synchronize()
        emu.take_sync_reasons()
        model.zero_grad()
        try:
            loss_of(model, batch(rank, 10)).backward()
        except ddp.NumericsError as error:
            return waited, str(error)
    return waited, ""


class OnTwo(nn.Module):
    """A layer on each of the two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).to(f"{DEVICE}:0"), nn.Linear(8, 4).to(f"{DEVICE}:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)).to(f"{DEVICE}:1"))
        return out


def checked_on_two_devices(rank: int) -> list[str]:
    """-> what each step raised; in the third, the gradients of the second device are finite."""
    torch.manual_seed(0)
    model = ddp.DistributedDataParallel(OnTwo(), find_unused_parameters=True)
    ddp.check_numerics(model, replicas_every=2)
    raised = []
    for step in range(5):
        model.zero_grad()
        hook = model.module.first.weight.register_hook(lambda grad: grad * float("nan"))
        if (rank, step) != (1, 2):
            hook.remove()
        try:
            loss_of(model, batch(rank, step)).backward()
            raised.append("")
        except ddp.NumericsError as error:
            raised.append(str(error))
        hook.remove()
    return raised


# --- in the capture of a graph ---------------------------------------------------------------------------


@contextmanager
def capturing() -> Iterator[None]:
    """The device says that it captures. It does not, but it counts what a capture would not permit."""
    emu.is_current_stream_capturing = lambda: True  # type: ignore[attr-defined]
    capture._questions.cache_clear()
    try:
        yield
    finally:
        del emu.is_current_stream_capturing  # type: ignore[attr-defined]
        capture._questions.cache_clear()


def captured(rank: int) -> tuple[dict[str, int], int]:
    """-> the growth of counts in a captured step, and how many of its buckets lose their memory to others later."""
    model = ddp.DistributedDataParallel(layers().to(DEVICE), bucket_cap_mb=0.005)
    check = ddp.check_numerics(model)
    waits(model, rank)
    x = batch(rank, 20)
    torch.accelerator.synchronize()
    before = emu.counters()
    with capturing():
        model.zero_grad()
        loss_of(model, x).backward()
    after = emu.counters()
    check.end()
    core = model.reducer.core
    sizes = {bucket.flat.data_ptr(): bucket.flat.untyped_storage().nbytes() for bucket in core.sender.buckets}
    core.rebuild(core.agreed_order)  # later steps use other buckets
    model.zero_grad()
    loss_of(model, batch(rank, 3)).backward()
    fresh = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes.values() for _ in range(4)]
    reused = {tensor.data_ptr() for tensor in fresh} & set(sizes)
    return {name: after[name] - before[name] for name in after}, len(reused)


def refused(rank: int, what: str) -> str:
    given: dict[str, Any] = {
        "find_unused": {"find_unused_parameters": True},
    }.get(what, {})
    model = ddp.DistributedDataParallel(layers().to(DEVICE), **given)
    if what != "early":
        waits(model, rank, 0)
    x = batch(rank, 0)
    with capturing():
        try:
            loss_of(model, x).backward()
        except RuntimeError as error:
            return str(error)
    return ""
