"""What runs in four ranks for test_combinations.py: the same training with torch's wrapper and with ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.utils import parametrizations

import ddp

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = ddp.DistributedDataParallel
CPU = torch.device("cpu")
STEPS = 4


def data(number: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(100 * step + number))


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def mesh_of(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def trained(module: nn.Module, step: Callable[[int], torch.Tensor | None]) -> list[torch.Tensor]:
    """-> all gradients of some steps, and the weights after them. `step` returns a loss, or runs a backward."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        if (loss := step(number)) is not None:
            loss.backward()
        found += [local(p.grad).clone() for p in module.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(local(p).clone() for p in module.parameters())]


def same(run: Callable[[Any], list[torch.Tensor]]) -> None:
    """`run(class)` gives the same gradients and weights with both classes."""
    theirs, ours = run(TorchDistributedDataParallel), run(OURS)
    assert len(theirs) == len(ours) > 0
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


# --- tensor parallelism, pipelines, sequences ----------------------------------------------------------------


def sharded_by_rows_and_columns(mesh: Any) -> nn.Module:
    return parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel(rank: int) -> None:
    """Replicated along one dimension of a mesh, whose other dimension shards the layers."""
    mesh = mesh_of("dp", "tp")

    def run(wrapper: Any) -> list[torch.Tensor]:
        module = sharded_by_rows_and_columns(mesh["tp"])
        wrapped = wrapper(module, device_mesh=mesh["dp"])
        return trained(module, lambda n: wrapped(data(rank // 2, n)).square().mean())

    same(run)
    with pytest.raises(RuntimeError, match=r"0\.weight: it is a DTensor.*device_mesh=mesh\['dp'\]"):
        OURS(sharded_by_rows_and_columns(mesh["tp"]), process_group=mesh["dp"].get_group())


def pipelined(rank: int) -> None:
    mesh = mesh_of("dp", "pp")
    replicas, stages, number = mesh["dp"].get_group(), mesh["pp"].get_group(), rank % 2

    def run(wrapper: Any, kind: Any) -> list[torch.Tensor]:
        module = layers()[:3] if number == 0 else layers()[3:]
        # torch's class fails in the second step, unless it keeps its first buckets.
        given = {} if wrapper is OURS else {"find_unused_parameters": True}
        wrapped = wrapper(module, process_group=replicas, **given)
        stage = PipelineStage(wrapped, number, 2, CPU, group=stages)
        schedule = kind(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)

        def step(n: int) -> None:
            schedule.step(data(rank // 2, n)) if number == 0 else schedule.step(
                target=data(rank // 2, n, 4, 4)
            )

        return trained(module, step)

    def interleaved(wrapper: Any) -> list[torch.Tensor]:
        modules = layers()[:2], layers()[2:4], layers()[4:], nn.Linear(4, 4, bias=False)
        mine = nn.ModuleList([modules[number], modules[number + 2]])
        given = {} if wrapper is OURS else {"find_unused_parameters": True}
        parts = [wrapper(each, process_group=replicas, **given) for each in mine]
        halves = [PipelineStage(part, number + 2 * i, 4, CPU, group=stages) for i, part in enumerate(parts)]
        schedule = ScheduleInterleaved1F1B(halves, n_microbatches=4, loss_fn=nn.functional.mse_loss)

        def step(n: int) -> None:
            schedule.step(data(rank // 2, n)) if number == 0 else schedule.step(
                target=data(rank // 2, n, 4, 4)
            )

        return trained(mine, step)

    for kind in (ScheduleGPipe, Schedule1F1B):
        same(lambda wrapper, kind=kind: run(wrapper, kind))
    same(interleaved)


class Gathered(torch.autograd.Function):
    """The parts of all ranks, one after the other. The backward adds up what all ranks need of this part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Each rank has a part of the sequence, and gathers keys and values: its backward runs collectives of its own."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.qkv, self.last = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        k, v = (Gathered.apply(each, self.group) for each in (k, v))
        out: torch.Tensor = self.last(torch.softmax(q @ k.mT, -1) @ v)
        return out


def context_parallel(rank: int) -> None:
    group = mesh_of("dp", "cp")["cp"].get_group()

    def run(wrapper: Any) -> list[torch.Tensor]:
        module = Attention(group)
        wrapped = wrapper(module, bucket_cap_mb=0.0001)
        return trained(
            module, lambda n: wrapped(data(rank // 2, n, 2, 16, 8).chunk(2, 1)[rank % 2]).square().mean()
        )

    same(run)


# --- FSDP ----------------------------------------------------------------------------------------------------


def fsdp_beside(rank: int) -> None:
    """Layers that fully_shard manages: around a wrapped part, and inside of the wrapper, which ignores them."""
    mesh = init_device_mesh("cpu", (4,))

    def around(wrapper: Any) -> list[torch.Tensor]:
        model = layers()
        model[2] = wrapper(model[2])
        for part in (model[0], model[4]):
            fully_shard(part, mesh=mesh)
        return trained(model, lambda n: model(data(rank, n)).square().mean())

    def inside(wrapper: Any) -> list[torch.Tensor]:
        model = layers()
        fully_shard(model[2], mesh=mesh)
        wrapper._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
        wrapped = wrapper(model)
        return trained(model, lambda n: wrapped(data(rank, n)).square().mean())

    def older_around(wrapper: Any) -> list[torch.Tensor]:
        """It takes the parameters out of the wrapped module, and averages them itself."""
        model = FullyShardedDataParallel(nn.Sequential(wrapper(layers())), device_id=CPU)
        return trained(model, lambda n: model(data(rank, n)).square().mean())

    same(around)
    same(inside)
    same(older_around)


def fsdp_refused(rank: int) -> None:
    """What FSDP has sharded is not averaged by accident, and what is sharded after wrapping is noticed."""
    mesh = mesh_of("dp", "fsdp")
    model = layers()
    fully_shard(model[2], mesh=mesh["fsdp"])
    for given in ({"process_group": mesh["dp"].get_group()}, {"device_mesh": mesh["dp"]}):
        with pytest.raises(RuntimeError, match=r"2\.bias: fully_shard has sharded it.*two-dimensional mesh"):
            OURS(model, **given)
    older = FullyShardedDataParallel(layers(), device_id=CPU)
    with pytest.raises(RuntimeError, match="FullyShardedDataParallel has sharded it"):
        OURS(older)
    wrapped = OURS(layers(), strict=True)
    outer = fully_shard(nn.Sequential(wrapped))
    with pytest.raises(RuntimeError, match="changed after it had been wrapped"):
        outer(data(rank, 0))


# --- functions, parametrizations, tied weights ---------------------------------------------------------------


def functional(rank: int) -> None:
    """Substitutes get gradients of their own; the wrapper goes on as before."""

    def run(wrapper: Any) -> list[torch.Tensor]:
        module = layers()
        wrapped = wrapper(module)
        x = data(rank, 50)
        substitutes = {n: p.detach().clone().requires_grad_() for n, p in wrapped.named_parameters()}
        values = {n: p.detach() for n, p in substitutes.items()}

        def loss(parameters: Any, batch: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = functional_call(wrapped, parameters, (batch,)).square().mean()
            return out

        def step(n: int) -> torch.Tensor:
            loss(substitutes, x).backward()
            assert all(p.grad is None for p in module.parameters())
            found.extend(grad(loss)(values, x).values())
            found.extend(vmap(grad(loss), in_dims=(None, 0))(values, x).values())
            own = loss(dict(wrapped.named_parameters()), data(rank, n))
            return own if n % 2 else wrapped(data(rank, n)).square().mean()

        found: list[torch.Tensor] = []
        return [*trained(module, step), *found, *(p.grad for p in substitutes.values())]

    same(run)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized(rank: int) -> None:
    def before(wrapper: Any) -> list[torch.Tensor]:
        module = layers()
        parametrizations.weight_norm(module[0])
        parametrizations.spectral_norm(module[2])
        parametrizations.orthogonal(module[4])
        wrapped = wrapper(module)
        return trained(module, lambda n: wrapped(data(rank, n)).square().mean())

    same(before)
    wrapped = OURS(layers(), strict=True)
    parametrizations.weight_norm(wrapped.module[0])  # which has other parameters
    with pytest.raises(RuntimeError, match=r"0\.parametrizations\.weight\.original0.* were added"):
        wrapped(data(rank, 0))


def tied(rank: int) -> None:
    """A weight inside of the wrapper is used outside of it as well."""

    def run(wrapper: Any) -> list[torch.Tensor]:
        body = nn.Sequential(*layers()[2:], nn.Linear(4, 8), nn.Linear(8, 8, bias=False))
        body[0] = nn.Linear(8, 8)
        outside = nn.Linear(8, 8, bias=False)
        body[4].weight = outside.weight
        wrapped = wrapper(body)
        return trained(body, lambda n: wrapped(outside(data(rank, n))).square().mean())

    same(run)


def lora(rank: int) -> None:
    """Adapters are trained first. When the rest is unfrozen, the module is wrapped anew."""

    def run(wrapper: Any) -> list[torch.Tensor]:
        module = layers()
        module[:4].requires_grad_(False)
        wrapped = [wrapper(module)]
        found = trained(module, lambda n: wrapped[0](data(rank, n)).square().mean())
        module.zero_grad()
        module.requires_grad_(True)
        wrapped[0] = wrapper(module)
        return found + trained(module, lambda n: wrapped[0](data(rank, n + STEPS)).square().mean())

    same(run)


def all_of(rank: int, *names: str) -> None:
    for name in names:
        globals()[name](rank)
        dist.barrier()
