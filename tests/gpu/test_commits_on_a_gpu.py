"""Commits of a state on a GPU: no commit waits for it, and no replay of a graph overtakes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp import elastic
from ddp.elastic.images import image, kept_images

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def newest(place: Path) -> tuple[int, dict[str, torch.Tensor]]:
    found: list[tuple[int, dict[str, torch.Tensor]]] = []
    for path in kept_images.slots_in([place]):
        each = image.Image(memoryview(kept_images.map_for_reading(path)))
        tensors = {leaf.path: each.tensor(number) for number, leaf in enumerate(each.layout.leaves)}
        found.append(
            (each.head.number, {name: tensor for name, tensor in tensors.items() if tensor is not None})
        )
    return max(found, key=lambda pair: pair[0])


def test_a_commit_does_not_wait_and_is_not_overtaken_by_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = elastic.State(model=model, optimizer=optimizer)
    try:
        state.resume()
        for _ in range(6):
            optimizer.step()
            state.commit()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the last commit may be under way
            optimizer.step()
        graph.replay()
        state.flush()
        wanted = {f"objects.model.{name}": each.cpu() for name, each in model.state_dict().items()}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # whatever waits for the GPU raises an error
        state.commit()
        torch.cuda.set_sync_debug_mode("default")
        for _ in range(20):
            graph.replay()
        state.flush()
        number, kept = newest(tmp_path / "scratch" / "elastic")
        assert number == 7
        assert all(torch.equal(kept[name], each) for name, each in wanted.items())
        assert not torch.equal(wanted["objects.model.0.weight"], model[0].weight.cpu())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        state.close()
        dist.destroy_process_group()
