"""Models that train in a world whose ranks die: what the ranks of test_models.py run."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchsDdp

import ddp
from ddp.groups import wrappers
from ddp.telemetry import torch_api, torch_names

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "copied": {},
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, given: torch.Tensor) -> Any:
        for layer in reversed(self.layers):  # not the order of the parameters: buckets are rebuilt
            given = torch.relu(layer(given))
        return self.norm(given).sum(dim=1)


class Unknown:
    """A state of a hook of which nobody knows how it starts anew."""


def _sum(_state, bucket):  # torch rejects annotations that are strings
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def hook_steps(state: dict[str, Any]) -> int:
    (_hook, kept) = state["model"]._comm_hooks[0]
    return int(kept.iter if hasattr(kept, "iter") else kept.step)


def restart_hook(state: dict[str, Any]) -> None:
    wrappers.renew_hook_state(state["model"]._comm_hooks[0][1])


def top(backend: str, kind: str, options: str, hook: str = "") -> dict[str, Any]:
    ddp.init(backend)
    torch.manual_seed(7 + dist.get_rank())  # a replacement need not have the same parameters
    model = Model()
    wrap: Any = {"ours": ddp.DistributedDataParallel, "torchs": TorchsDdp}[kind]
    # torch's PowerSGD waits inside of callbacks, so two buckets would block the two threads of Gloo for ever.
    megabytes = 25 if hook == "torchs" else 0.02
    wrapped = wrap(model, **{"bucket_cap_mb": megabytes, **OPTIONS[options]})
    if options == "copied":  # no hook of torch's sees that wrapper
        wrapped = copy.deepcopy(wrapped)
    if hook == "torchs":
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=3, min_compression_rate=0.5)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if hook == "unknown":
        wrapped.register_comm_hook(Unknown(), _sum)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    return {"model": wrapped, "optimizer": optimizer, "step": 0}


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(state: dict[str, Any], until: int, dies: tuple[int, int, str] = (-1, -1, "")) -> int:
    """`dies`: a rank, a step, and where it dies: in its forward, or after a backward under no_sync()."""
    model, optimizer = state["model"], state["optimizer"]
    while state["step"] < until:
        step = state["step"]
        victim = (dist.get_rank(), step) == dies[:2]
        if victim and dies[2] == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        with model.no_sync() if dies[2] == "no_sync" else contextlib.nullcontext():
            model(batch(step, dist.get_rank())).sum().backward()
        if dies[2] == "no_sync":
            if victim:
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch(step, dist.get_rank() + 100)).sum().backward()
        if victim and dies[2] == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        dist.barrier()
        state["step"] += 1
        state["kept"] = _copy(state)
    return int(state["step"])


def _copy(state: dict[str, Any]) -> Any:
    everything = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, (state["step"], everything)
    )


def resume(state: dict[str, Any]) -> int:
    """All ranks go back to the newest state that every rank with a state has; the others get it from one of these."""
    kept = state.get("kept")
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, -1 if kept is None else kept[0])
    survivor = next(rank for rank, step in enumerate(steps) if step >= 0)
    box = [kept]
    dist.broadcast_object_list(box, survivor)
    state["step"], everything = box[0]
    state["model"].load_state_dict(everything["model"])
    state["optimizer"].load_state_dict(everything["optimizer"])
    return int(state["step"])


def weights(state: dict[str, Any]) -> list[float]:
    """Sums of parameters and moments. Buffers are those of rank 0, which a survivor need not have."""
    tensors = [*state["model"].parameters()]
    tensors += [v for each in state["optimizer"].state.values() for v in each.values()]
    return [float(each.detach().double().abs().sum()) for each in tensors if torch.is_tensor(each)]


def early(backend: str, what: str) -> dict[str, Any]:
    """A script that communicates before it trains."""
    ddp.init(backend)
    dist.barrier()
    if os.environ.get("DDP_JOINS") == "1" and what == "broadcast":
        dist.broadcast(torch.zeros(1), 0)
    if os.environ.get("DDP_JOINS") == "1" and what == "objects":
        dist.all_gather_object([None] * dist.get_world_size(), 1)
    model = TorchsDdp(torch.nn.Linear(2, 2))
    if os.environ.get("DDP_JOINS") == "1" and what == "forward":
        model(torch.ones(1, 2))
    return {"model": model}


def sharded(backend: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    ddp.init(backend)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    return {"model": model}


def accumulate(state: dict[str, Any]) -> tuple[bool, bool, bool]:
    """A micro-batch that is not the last one of its step."""
    state["model"].set_requires_gradient_sync(False)
    state["model"].set_is_last_backward(False)
    state["model"](torch.ones(2, 8)).sum().backward()
    return accumulated(state)


def accumulated(state: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether gradients are averaged, whether it is the last backward of a step, and whether there are gradients."""
    fsdp = state["model"]._get_fsdp_state()
    (group,) = fsdp._fsdp_param_groups
    gathered = [getattr(each, "_unsharded_param", None) for each in group.fsdp_params]
    has_gradients = any(each is not None and each.grad is not None for each in gathered)
    return group.reduce_grads, fsdp._state_ctx.is_last_backward, has_gradients


def flat(backend: str) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    ddp.init(backend)
    return {"model": FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))}


def flat_later(state: dict[str, Any]) -> None:
    """Make a model of FSDP1 when training has begun."""
    state["later"] = flat("shm")["model"]


def shard_later(state: dict[str, Any]) -> None:
    state["later"] = sharded("shm")["model"]


def count_searches(state: dict[str, Any]) -> None:
    """Count the searches of all objects from now on, in a process that has imported FSDP."""
    import torch.distributed.fsdp  # noqa: F401

    state["searches"] = 0
    original = gc.get_referrers

    def counted(*args: Any, **options: Any) -> list[Any]:
        state["searches"] += 1
        return original(*args, **options)

    gc.get_referrers = counted


def found_in_both_ways(state: dict[str, Any]) -> int:
    """How many modules in shards there are: in torch's table, and in the search that replaces it."""
    in_table, has = wrappers.in_shards(), torch_api.has
    torch_api.has = lambda name: name is not torch_names.STATES_OF_MODULES and has(name)
    searched, torch_api.has = wrappers.in_shards(), has
    assert set(map(id, in_table)) == set(map(id, searched))
    return len(in_table)


def searches(state: dict[str, Any]) -> int:
    return int(state.get("searches", 0))
