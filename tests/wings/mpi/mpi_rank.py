"""What a rank does that mpirun has started: each part compares with Gloo over the same ranks, or says what it saw."""

from __future__ import annotations

import copy
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import ddp

warnings.filterwarnings("ignore", message=".*deprecated.*", category=FutureWarning)
KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def place(backend):
    """Who MPI says we are, and that the group works."""
    here = ddp.init(backend)
    total = torch.full((3,), float(here.rank + 1))
    dist.all_reduce(total)
    said = [here.rank, here.world_size, here.local_rank, here.local_world_size, here.node_rank, here.backend]
    return [*said, total.tolist()]


def collectives():
    ddp.init("mpi")
    gloo = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in KINDS:
        for shape in ((5,), (3, 4), ()):
            given = (torch.arange(max(1, torch.Size(shape).numel())).reshape(shape) % 3 + rank).to(dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
                same(given, gloo, lambda tensor, group, op=op: dist.all_reduce(tensor, op, group=group))
                same(given, gloo, lambda tensor, group, op=op: dist.reduce(tensor, 1, op, group=group), at=1)
        same(given, gloo, lambda tensor, group: dist.broadcast(tensor, 1, group=group))
    wide = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).t()
    same(wide, gloo, lambda tensor, group: dist.all_reduce(tensor, group=group))
    same(wide.to(torch.complex64), gloo, lambda tensor, group: dist.all_reduce(tensor, group=group))
    average = torch.tensor([float(rank)])
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.item() == (world - 1) / 2
    truth = torch.tensor([rank == 0, False])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, False]
    assert truth.view(torch.uint8).tolist() == [1, 0]
    mine = torch.tensor([[rank, 7]])
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    assert torch.cat(parts).tolist() == [[other, 7] for other in range(world)]
    joined = torch.empty(world, 2, dtype=torch.int64)
    dist.all_gather_into_tensor(joined, mine)
    assert joined.tolist() == [[other, 7] for other in range(world)]
    share = torch.empty(2)
    dist.reduce_scatter_tensor(share, torch.arange(2.0 * world))
    assert share.tolist() == [2.0 * rank * world, (2.0 * rank + 1) * world]
    dist.reduce_scatter(share, [torch.full((2,), float(other)) for other in range(world)])
    assert share.tolist() == [rank * world] * 2
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(world)]
    dist.barrier()
    alone = dist.new_group([1], backend="mpi4py")
    if rank == 1:
        lonely = torch.tensor([3.0])
        dist.all_reduce(lonely, group=alone)
        assert lonely.item() == 3.0
    return "the same"


def same(given, gloo, do, at=None):
    ours, theirs = given.clone(), given.clone()
    do(ours, dist.group.WORLD)
    do(theirs, gloo)
    if at in (None, dist.get_rank()):
        assert torch.equal(ours, theirs), (given, ours, theirs)
    else:
        assert torch.equal(ours, given)


def training():
    """torch's DDP and ours, each with the same result as over Gloo."""
    ddp.init("mpi")
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))
    for wrap in (nn.parallel.DistributedDataParallel, ddp.DistributedDataParallel):
        results = []
        for group in (dist.group.WORLD, gloo):
            model = wrap(copy.deepcopy(first), process_group=group, bucket_cap_mb=0.002)
            results.append(after_steps(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return "the same"


def after_steps(model, optimizer):
    torch.manual_seed(dist.get_rank() + 5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def refused():
    """What there is not, is said to be in another backend."""
    ddp.init("mpi")
    said = []
    one, two = torch.ones(1), [torch.ones(1), torch.ones(1)]
    for call in (
        lambda: dist.send(one, 1 - dist.get_rank()),
        lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2)),
        lambda: dist.all_to_all([torch.empty(1), torch.empty(1)], two),
        lambda: dist.scatter(one, two if dist.get_rank() == 0 else None, src=0),
        lambda: dist.all_reduce(torch.ones(2).to_sparse()),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
    ):
        try:
            call()
        except NotImplementedError as error:
            said.append(str(error))
    return said


def late():
    """Who waits for somebody that does not come is told so; the call itself goes on."""
    ddp.init("mpi")
    said, total = "", torch.ones(1)
    if dist.get_rank() == 0:
        from datetime import timedelta

        work = dist.all_reduce(total, async_op=True)
        try:
            work.wait(timedelta(seconds=0.2))
        except dist.DistBackendError as error:
            said = str(error)
        from mpi4py import MPI

        MPI.COMM_WORLD.send("go on", 1)
        work.wait()
    else:
        from mpi4py import MPI

        MPI.COMM_WORLD.recv(source=0)
        dist.all_reduce(total)
    return [said, total.item()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, *more = sys.argv[1:]
    answer = globals()[what](*more)
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        json.dump(answer, file)
    ddp.shutdown()
