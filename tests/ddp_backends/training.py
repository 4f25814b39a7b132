"""What the ranks run: torch's own parallel training over our backends, and what goes past the core."""

from __future__ import annotations

import copy
import json
import random
import warnings

import torch
import torch.distributed as dist
from same_as_gloo import digest, gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 7))


def train(module, optimizer, steps=3):
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


def torchs_ddp():
    """Over shm as over Gloo, with several buckets."""
    results = []
    for group in (None, gloo()):
        wrapped = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01)
        train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9))
        results.append([p.detach() for p in wrapped.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    return digest(*results[0])


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, sharded = model(), model()
    one = DistributedDataParallel(plain)
    train(one, torch.optim.Adam(one.parameters(), 0.01))
    two = DistributedDataParallel(sharded)
    train(two, ZeroRedundancyOptimizer(two.parameters(), torch.optim.Adam, lr=0.01))
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    return digest(*[p.detach() for p in sharded.parameters()])


def fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 4))
        for parameter in plain.parameters():
            dist.broadcast(parameter.data, 0)
        sharded = copy.deepcopy(plain)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        wrapped = DistributedDataParallel(plain)
        train(wrapped, torch.optim.SGD(plain.parameters(), 0.1))
        train(sharded, torch.optim.SGD(sharded.parameters(), 0.1))
        for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert torch.allclose(a, b.full_tensor(), atol=1e-5)
    return digest(*[p.detach() for p in plain.parameters()])


def functional_collectives():
    import torch.distributed._functional_collectives as functional

    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert (functional.all_reduce(torch.full((5,), 2.0), "sum", group) == 2 * world).all()
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert torch.equal(gathered, torch.arange(float(world)).repeat_interleave(2))
    scattered = functional.reduce_scatter_tensor(torch.arange(2.0 * world), "sum", 0, group)
    assert torch.equal(scattered, world * torch.arange(2.0 * rank, 2.0 * rank + 2))
    both = functional.all_reduce_coalesced([torch.ones(3), torch.ones(4)], "sum", group)
    assert all((each == world).all() for each in both)


def past_the_core():
    """What Gloo does for us."""
    world, rank = dist.get_world_size(), dist.get_rank()
    following, previous = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(3)
    sender = dist.isend(torch.full((3,), float(rank)), following)
    dist.recv(got, previous)
    sender.wait()
    assert (got == previous).all()
    parts = torch.empty(world)
    dist.group.WORLD.all_to_all_single(parts, torch.arange(float(world)) + 10 * rank, [], []).wait()
    assert torch.equal(parts, torch.arange(world) * 10.0 + rank)
    listed = [torch.empty(1) for _ in range(world)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), listed, 0)
    assert rank or torch.equal(torch.cat(listed), torch.arange(float(world)))
    mine = torch.empty(1)
    dist.scatter(mine, list(torch.arange(float(world)).split(1)) if rank == 1 else None, 1)
    assert mine.item() == rank
    said = [None] * world
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": r} for r in range(world)]
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world,))
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.ones(world))


def many_at_once(seed):
    """In flight together, waited for in any order, by future and by work; some forgotten."""
    random.seed(seed)
    world = dist.get_world_size()
    started = []
    for number in range(60):
        numel = random.choice([1, 10, 5000, 200_000])
        tensor = torch.full((numel,), float(number))
        how = random.choice(["wait", "future", "forget"])
        started.append(
            (number, tensor if how != "forget" else None, dist.all_reduce(tensor, async_op=True), how)
        )
        del tensor
    random.shuffle(started)
    for number, tensor, work, how in started:
        if how == "wait":
            work.wait()
            assert work.is_success()
        elif how == "future":
            (result,) = work.get_future().wait()
            assert result is tensor
        if how != "forget":
            assert (tensor == world * number).all()
    dist.barrier()


def groups_side_by_side():
    """Subgroups that overlap, each in its own order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group([r, (r + 1) % world], backend="shm") for r in range(world)]
    alone = [dist.new_group([r], backend="shm") for r in range(world)]
    tensors, works = {}, []
    order = list(range(world)) if rank % 2 else list(reversed(range(world)))
    for r in order:
        if rank in (r, (r + 1) % world):
            tensors[r] = torch.full((100_000,), float(rank + 1))
            works.append(dist.all_reduce(tensors[r], group=halves[r], async_op=True))
    for work in works:
        work.wait()
    for r, tensor in tensors.items():
        assert (tensor == (r + 1) + ((r + 1) % world + 1)).all()
    lonely = torch.full((20_000,), 3.0)
    dist.all_reduce(lonely, dist.ReduceOp.AVG, group=alone[rank])
    dist.broadcast(lonely, rank, group=alone[rank])
    assert (lonely == 3).all()
    return dist.get_backend(alone[rank])


def totals(sizes, dtype):
    """Sums over all ranks, against what they must be; with buckets on some ranks. -> a digest"""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    kept = []
    for numel in sizes:
        for allocate in (lambda n: torch.empty(n, dtype=dtype), lambda n: group.ddp_allocate(n, dtype), None):
            if allocate is None:
                bucket = group.ddp_allocate(numel, dtype) if rank % 2 else torch.empty(numel, dtype=dtype)
            else:
                bucket = allocate(numel)
            bucket.copy_((torch.arange(numel) % 13) * (rank + 1))
            group.ddp_average([bucket], world).wait()
            exact = (torch.arange(numel) % 13).double() * (world + 1) / 2
            assert torch.allclose(bucket.double(), exact, rtol=2e-2 if dtype.itemsize == 2 else 1e-6), numel
            kept.append(bucket.clone())
        for op, exact in ((dist.ReduceOp.MAX, world), (dist.ReduceOp.MIN, 1)):
            tensor = torch.full((numel,), rank + 1, dtype=dtype)
            dist.all_reduce(tensor, op)
            assert (tensor == exact).all()
    dist.barrier()
    tensor = torch.full((3,), float(rank))
    dist.broadcast(tensor, world - 1)
    assert (tensor == world - 1).all()
    return digest(*kept)


def whole_numbers(sizes):
    world, rank = dist.get_world_size(), dist.get_rank()
    for numel in sizes:
        tensor = torch.arange(numel) * (rank + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(numel) * (world * (world + 1) // 2))
        tensor = torch.full((numel,), 1 << rank)
        dist.all_reduce(tensor, dist.ReduceOp.BOR)
        assert (tensor == (1 << world) - 1).all()
    return True


def our_ddp():
    """-> how many collectives Gloo carried in one step, and how many buckets there are."""
    from ddp import DistributedDataParallel as Ours

    counted = ()
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        results = []
        for kind, group in ((Ours, None), (DistributedDataParallel, gloo())):
            torch.manual_seed(0)
            large = nn.Sequential(nn.Linear(32, 600), *(nn.Linear(600, 600) for _ in range(6)))
            wrapped = kind(large, process_group=group, bucket_cap_mb=3, **options)
            train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9))
            results.append([p.detach() for p in wrapped.parameters()])
            if kind is Ours and not options:
                counted = collectives_of_gloo(wrapped), len(wrapped.reducer.core.sender.buckets)
        for ours, theirs in zip(*results, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
    return counted


def collectives_of_gloo(wrapped):
    """As torch's flight recorder counts them."""
    loss = wrapped(torch.randn(8, 32)).square().mean()
    before = recorded()
    loss.backward()
    return recorded() - before


def recorded():
    return len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", []))
