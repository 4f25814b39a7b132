"""What the ranks run: the same collective over shm and over Gloo, on the same data."""

from __future__ import annotations

import functools
import zlib

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

SMALL = 16384  # bytes; what is reduced by everybody
STAGING = 1 << 19  # bytes of a turn
PERIOD = 65_537  # of the numbers in a tensor; a prime: the parts of a turn differ


@functools.cache
def gloo():
    return dist.new_group(backend="gloo")


def sizes(dtype, borders=True):
    """Of tensors: all at a border between two ways, or one of each way."""
    small, turn = SMALL // dtype.itemsize, STAGING // dtype.itemsize
    if not borders:
        return [1001, small + 1, turn + 1]
    return [0, 1, 3, 1001, small, small + 1, turn - 1, turn, turn + 1, 2 * turn + 17]


def data(numel, dtype, seed=0, rank=None):
    start = 1009 * seed % PERIOD
    numbers = random_numbers(dtype, dist.get_rank() if rank is None else rank)
    return numbers.repeat((start + numel) // PERIOD + 1)[start : start + numel].clone()


@functools.cache
def random_numbers(dtype, rank):
    """Drawn once: that takes longer than most collectives."""
    random = torch.Generator().manual_seed(rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (PERIOD,), generator=random).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        parts = torch.randn(PERIOD * (2 if dtype.is_complex else 1), generator=random, dtype=torch.float64)
        return torch.view_as_complex(parts.view(PERIOD, 2)).to(dtype) if dtype.is_complex else parts.to(dtype)
    return torch.randint(-5 if dtype.is_signed else 0, 7, (PERIOD,), generator=random).to(dtype)


def digest(*tensors):
    whole = 0
    for tensor in tensors:
        whole = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy(), whole)
    return whole


def check(ours, theirs, what):
    assert ours.shape == theirs.shape, what
    if theirs.dtype is torch.bool:
        ours, theirs = ours.view(torch.uint8) != 0, theirs.view(torch.uint8) != 0
    if theirs.dtype.is_floating_point or theirs.dtype.is_complex:
        loose = 0.1 if theirs.dtype in (torch.bfloat16, torch.float16) else 1e-5
        assert torch.allclose(ours, theirs, rtol=loose, atol=loose), (what, (ours - theirs).abs().max())
    else:
        assert torch.equal(ours, theirs), what


def by_name(op):
    return getattr(ReduceOp, op)


def expected_reduction(numel, dtype, op, seed=0):
    """Gloo's answer, or for types that it lacks the answer formed here."""
    tensor = data(numel, dtype, seed)
    if dtype is not torch.int16 and not (dtype is torch.bool and op == "BXOR"):
        dist.all_reduce(tensor, by_name(op), group=gloo())
        return tensor
    parts = [data(numel, dtype, seed, rank) for rank in range(dist.get_world_size())]
    fold = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]
    return functools.reduce(fold, parts)


def all_reduce(dtype, op, borders):
    digests = []
    for seed, numel in enumerate(sizes(dtype, borders)):
        ours = data(numel, dtype, seed)
        dist.all_reduce(ours, by_name(op))
        check(ours, expected_reduction(numel, dtype, op, seed), (dtype, op, numel))
        digests.append(digest(ours))
    return digests


def average(dtype):
    """Against float64, since Gloo has no average for every type."""
    digests, world = [], dist.get_world_size()
    for seed, numel in enumerate(sizes(dtype)):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        exact = sum(data(numel, dtype, seed, rank).to(wide) for rank in range(world)) / world
        ours = data(numel, dtype, seed)
        dist.all_reduce(ours, ReduceOp.AVG)
        check(ours, exact.to(dtype), numel)
        seam = data(numel, dtype, seed)
        dist.group.WORLD.ddp_average([seam], world).wait()
        assert digest(seam) == digest(ours)
        digests.append(digest(ours))
    return digests


def half_sums_are_rounded_once(dtype):
    exact = sum(data(5000, dtype, 1, rank).float() for rank in range(dist.get_world_size()))
    ours = data(5000, dtype, 1)
    ours[:4] = torch.tensor([float("inf"), float("nan"), 0.0, torch.finfo(dtype).tiny / 4])
    exact[:4] = ours[:4].float() * dist.get_world_size()
    dist.all_reduce(ours)
    assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(exact.to(dtype)))
    assert ours[1].isnan()


def reduce_to_each_root(dtype, op):
    for root in range(dist.get_world_size()):
        for seed, numel in enumerate(sizes(dtype)):
            ours = data(numel, dtype, seed)
            dist.reduce(ours, root, by_name(op))
            wanted = expected_reduction(numel, dtype, op, seed)
            if dist.get_rank() != root:
                wanted = data(numel, dtype, seed)
            check(ours, wanted, (dtype, op, numel, root))


def broadcast(dtype):
    digests = []
    for root in range(dist.get_world_size()):
        for seed, numel in enumerate(sizes(dtype)):
            ours = data(numel, dtype, seed)
            dist.broadcast(ours, root)
            assert digest(ours) == digest(data(numel, dtype, seed, root))
            digests.append(digest(ours))
    return digests


def all_gather(dtype):
    world = dist.get_world_size()
    digests = []
    for seed, numel in enumerate(sizes(dtype)):
        wanted = [data(numel, dtype, seed, rank) for rank in range(world)]
        listed = [torch.empty(numel, dtype=dtype) for _ in range(world)]
        dist.all_gather(listed, data(numel, dtype, seed))
        flat = torch.empty(world * numel, dtype=dtype)
        dist.group.WORLD._allgather_base(flat, data(numel, dtype, seed)).wait()
        assert digest(*listed) == digest(flat) == digest(*wanted)
        digests.append(digest(flat))
    return digests


def reduce_scatter(dtype, op):
    world, rank = dist.get_world_size(), dist.get_rank()
    for seed, numel in enumerate(sizes(dtype)):
        given = data(world * numel, dtype, seed)
        wanted = expected_reduction(world * numel, dtype, op, seed)[rank * numel : (rank + 1) * numel]
        listed, flat = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        dist.reduce_scatter(listed, list(given.chunk(world)) if numel else [given] * world, by_name(op))
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = by_name(op)
        dist.group.WORLD._reduce_scatter_base(flat, given, opts).wait()
        check(flat, wanted, (dtype, op, numel))
        assert digest(listed) == digest(flat)
        assert digest(given) == digest(data(world * numel, dtype, seed))


# --- lists, layouts, and memory that peers can read ------------------------------------------------------


def lists():
    """A list of tensors counts as one array, wherever the borders are."""
    world, group = dist.get_world_size(), dist.group.WORLD
    for seed, cuts in enumerate([[1], [3, 0, 5], [70_000, 1, 65_537, 131_071], [7] * 2000, [400_000, 3]]):
        parts = [data(n, torch.float32, seed + 50 * i) for i, n in enumerate(cuts)]
        flat = torch.cat(parts)
        group.ddp_average(parts, world).wait()
        dist.all_reduce(flat, ReduceOp.AVG)
        assert digest(*parts) == digest(flat), cuts
        coalesced = [data(n, torch.float32, seed + 50 * i) for i, n in enumerate(cuts)]
        with dist._coalescing_manager(group=group):
            for part in coalesced:
                dist.all_reduce(part)
        assert torch.allclose(torch.cat(coalesced) / world, flat, atol=1e-6)


def several_tensors_of_one_rank():
    """Where torch's groups take a list for the tensors of one rank's devices, this one does, too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    outcomes = []
    for group in (dist.group.WORLD, gloo()):
        given = [torch.tensor([rank + 1.0]), torch.tensor([10.0])]
        group.allreduce(given).wait()
        opts = dist.BroadcastOptions()
        opts.rootRank, opts.rootTensor = world - 1, 1
        sent = [torch.tensor([rank + 0.25]), torch.tensor([rank + 0.5])]
        group.broadcast(sent, opts).wait()
        outcomes.append([tensor.item() for tensor in (*given, *sent)])
    assert outcomes[0] == outcomes[1], outcomes


def what_cannot_be():
    """Refused on every rank before anything moves, in Gloo's words; the group stays good."""
    world, group = dist.get_world_size(), dist.group.WORLD
    tensor = torch.ones(2)
    for root in (-1, world, 1 << 20):
        for wrong in (dist.broadcast, dist.reduce):
            assert "invalid root rank" in refused(wrong, tensor, root)
    for outputs in ([[tensor] * (world - 1)], [[]], []):
        refused(group.allgather, outputs, [tensor])
    for inputs in ([[tensor] * (world + 1)], [[]], []):
        refused(group.reduce_scatter, [tensor], inputs)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world] * 2


def refused(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{function.__name__} took {arguments[1:]}")


def odd_layouts():
    world = dist.get_world_size()
    base = data(4 * 6 * 5 * 7, torch.float32).reshape(4, 6, 5, 7)
    wanted = base.clone()
    dist.all_reduce(wanted, group=gloo())
    for made in (
        lambda: base.clone().to(memory_format=torch.channels_last),
        lambda: base.clone().permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        lambda: torch.cat([base, base], dim=3)[..., :7],
    ):
        tensor = made()
        strides = tensor.stride()
        dist.all_reduce(tensor)
        check(tensor, wanted, strides)
        assert tensor.stride() == strides
        tensor = made()
        future = dist.all_reduce(tensor, async_op=True).get_future()
        future.wait()
        check(tensor, wanted, strides)
        tensor = made()
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, data(base.numel(), torch.float32, 0, 1).view(base.shape))
    conjugate = data(10, torch.complex64).conj()
    exact = sum(data(10, torch.complex64, 0, rank).conj() for rank in range(world))
    dist.group.WORLD.allreduce([conjugate]).wait()
    assert torch.allclose(conjugate, exact)
    parent = torch.zeros(2, 10)
    column = torch.stack([data(10, torch.float32, 0, 0)] * 3, dim=1)[:, 1]
    dist.all_gather([parent[0], torch.empty(10), *[torch.empty(10)] * (world - 2)], column)
    assert torch.equal(parent[0], column)


def shared_memory_blocks():
    """Buckets where peers read them, on all ranks, on some, in part; against ordinary memory."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    digests = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for seed, numel in enumerate([1, 5000, 131_072, 300_001]):
            wanted = data(numel, dtype, seed)
            dist.all_reduce(wanted, ReduceOp.AVG)
            for who in (range(world), [0], [world - 1], range(1, world)):
                bucket = (
                    group.ddp_allocate(numel + 3, dtype)
                    if rank in who
                    else torch.empty(numel + 3, dtype=dtype)
                )
                bucket[:] = 7
                part = bucket[3:]
                part.copy_(data(numel, dtype, seed))
                group.ddp_average([part], world).wait()
                assert digest(part) == digest(wanted), (dtype, numel, who)
                assert (bucket[:3] == 7).all()
            digests.append(digest(wanted))
    return digests


def blocks_are_given_back():
    import gc
    import os

    files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    mine = next(f for f in files if os.path.exists(f) and "ddp-shm" in os.readlink(f))
    group = dist.group.WORLD
    gc.collect()  # an earlier case's block is not to go while these are counted
    dist.barrier()
    before = os.stat(mine).st_blocks
    dist.barrier()
    blocks = [group.ddp_allocate(1 << 20, torch.float32) for _ in range(5)]
    for number, block in enumerate(blocks):
        block.fill_(number)
    assert [int(block[-1]) for block in blocks] == [0, 1, 2, 3, 4]
    assert os.stat(mine).st_blocks - before >= 5 * (4 << 20) // 512
    dist.barrier()
    del blocks[1:3], block
    again = group.ddp_allocate(2 << 20, torch.float32)
    assert (again == 0).all(), "the gap of two blocks is used again, and what lay there is gone"
    del blocks, again
    gc.collect()
    dist.barrier()
    after = os.stat(mine).st_blocks
    dist.barrier()
    return (after - before) * 512


def bytes_of_any_type(dtype):
    tensor = data(999, torch.float32).to(dtype)
    dist.broadcast(tensor, 1)
    assert digest(tensor) == digest(data(999, torch.float32, 0, 1).to(dtype))
    return digest(tensor)


def done_before_it_returns():
    """A blocking call of one tensor: what it returns is done, whatever it is asked; also behind others under way."""
    group, world = dist.group.WORLD, dist.get_world_size()
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    tensor, before = torch.ones(3), torch.ones(1 << 20)
    for under_way in (False, True):
        waiting = dist.all_reduce(before, async_op=True) if under_way else None
        work = group.allreduce([tensor.fill_(1)], opts)
        assert tensor.tolist() == [world] * 3
        assert work.is_completed()
        assert work.is_success()
        assert work.wait()
        assert work.exception() is None
        assert work.result()[0] is tensor
        assert work.get_future().wait()[0] is tensor
        if waiting is not None:
            waiting.wait()
            assert before[0].item() == world
    negative = torch.tensor([1 - 2j]).conj().imag  # contiguous, and yet not what lies in memory
    dist.all_reduce(negative)
    assert negative.tolist() == [2.0 * world]


def tree_sum(parts):
    """(0 + 1) + (2 + 3), and so on; an odd one out joins at the end of the next row."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) // 2 * 2 :]
    return parts[0]


def sums_are_a_tree(dtype):
    """To the last bit, in all ways of the core: all of it, slices, slices in the shared file, scattered."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for numel in sizes(dtype):
        parts = [data(numel, dtype, numel, each) for each in range(size)]
        expected = tree_sum(parts)
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        block = dist.group.WORLD.ddp_allocate(numel, dtype)
        block.copy_(parts[rank])
        dist.group.WORLD.ddp_average([block], 3.0).wait()
        assert torch.equal(tensor, expected), numel
        assert torch.equal(block, expected / 3), numel
    rows = [data(size * 1001, dtype, 5, each) for each in range(size)]
    mine = torch.empty(1001, dtype=dtype)
    dist.reduce_scatter_tensor(mine, rows[rank])
    assert torch.equal(mine, tree_sum(rows)[1001 * rank : 1001 * (rank + 1)])
