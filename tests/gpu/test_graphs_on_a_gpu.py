"""Our wrapper in real captures of CUDA graphs, compiled for the device, and with a GradScaler; beside torch's class.

One rank over NCCL: a capture needs NCCL, and what a capture forbids it forbids with one rank too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

CLASSES: list[Any] = [nn.parallel.DistributedDataParallel, ddp.DistributedDataParallel]
_WARM_UP = 11
_GRAPHS: list[torch.cuda.CUDAGraph] = []


@pytest.fixture(autouse=True)
def nccl(tmp_path: Path) -> Iterator[None]:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    torch.cuda.synchronize()
    for graph in _GRAPHS:  # a communicator is not destroyed as long as a graph may use it
        graph.reset()
    _GRAPHS.clear()
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(256, 4)).cuda()


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(step)).cuda()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def captured(x: torch.Tensor, hook: Any = None, **given: Any) -> tuple[Any, torch.cuda.CUDAGraph]:
    """A wrapper, and a graph of its forward and backward with all collectives; all made in one side stream."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    _GRAPHS.append(graph)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapped = ddp.DistributedDataParallel(network(), device_ids=[0], **given)
        if hook is not None:
            wrapped.register_comm_hook(*hook)
        for step in range(_WARM_UP):
            wrapped.zero_grad(set_to_none=True)
            loss_of(wrapped, batch(step)).backward()
        wrapped.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        loss_of(wrapped, x).backward()
    return wrapped, graph


@pytest.mark.parametrize(
    "given",
    [{}, {"bucket_cap_mb": 0.2}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
)
def test_a_captured_step_gives_the_gradients_of_an_eager_one(given: dict[str, Any]) -> None:
    x = batch(0)
    wrapped, graph = captured(x, **given)
    for step in (20, 21, 22):
        x.copy_(batch(step))
        graph.replay()
        found = gradients(wrapped)
        plain = network()
        loss_of(plain, batch(step)).backward()
        for mine, wanted in zip(found, gradients(plain), strict=True):
            torch.testing.assert_close(mine, wanted)


def test_eager_steps_between_replays_leave_the_graphs_memory_alone() -> None:
    x = batch(0)
    wrapped, graph = captured(x)
    averages = [p.grad for p in wrapped.parameters()]
    for step in range(3):
        wrapped.zero_grad(set_to_none=True)
        loss_of(wrapped, batch(step)).backward()
    x.copy_(batch(30))
    graph.replay()
    plain = network()
    loss_of(plain, batch(30)).backward()
    for mine, wanted in zip(averages, gradients(plain), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
    ],
)
def test_what_a_replay_could_not_repeat_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        captured(batch(0), **given)


def test_parts_that_are_graphed_before_wrapping() -> None:
    x = batch(0)
    found = []
    for wrapper in CLASSES:
        module = network()
        graphed = torch.cuda.make_graphed_callables(module, (x.clone().requires_grad_(),))
        wrapped = wrapper(graphed, device_ids=[0])
        for step in range(4):
            wrapped.zero_grad(set_to_none=True)
            loss_of(wrapped, batch(step).requires_grad_()).backward()
        found.append(gradients(wrapped))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_step_waits_for_nothing() -> None:
    """torch raises where the host waits for the device."""
    wrapped = ddp.DistributedDataParallel(network(), device_ids=[0])
    inputs = [batch(step) for step in range(6)]
    for step, x in enumerate(inputs):
        wrapped.zero_grad(set_to_none=True)
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        try:
            loss_of(wrapped, x).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}])
def test_compiled_as_with_torchs_class(how: dict[str, Any]) -> None:
    found = []
    for wrapper in CLASSES:
        torch._dynamo.reset()
        wrapped = wrapper(network(), device_ids=[0])
        model = torch.compile(wrapped, **how)
        for step in range(3):
            wrapped.zero_grad()
            loss_of(model, batch(step)).backward()
        found.append(gradients(wrapped))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_scaler_as_with_torchs_class() -> None:
    found = []
    for wrapper in CLASSES:
        model = wrapper(network(), device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(model, batch(step)) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found.append((scales, [p.detach() for p in model.parameters()]))
    (their_scales, theirs), (scales, ours) = found
    assert scales == their_scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)
