"""A rank that calls each collective, and compares what comes back with what it must be.

collectives.py [NAME ...]
"""

from __future__ import annotations

import sys

import rank
import torch
import torch.distributed as dist

_COUNT = 1000


def mine(of: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What rank `of` contributes; small whole numbers, so that sums are exact in every type."""
    return (torch.arange(_COUNT) % 7 + of + 1).to(dtype)


def all_reduce(where: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        tensor = mine(rank.RANK, dtype).to(where)
        dist.all_reduce(tensor)
        torch.testing.assert_close(tensor.cpu(), sum(mine(each, dtype) for each in range(rank.RANKS)))


def all_reduce_max(where: torch.device) -> None:
    tensor = mine(rank.RANK).to(where)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    torch.testing.assert_close(tensor.cpu(), mine(rank.RANKS - 1))


def broadcast(where: torch.device) -> None:
    for source in range(rank.RANKS):
        tensor = mine(rank.RANK).to(where)
        dist.broadcast(tensor, source)
        torch.testing.assert_close(tensor.cpu(), mine(source))


def all_gather(where: torch.device) -> None:
    into = [torch.empty(_COUNT, device=where) for _ in range(rank.RANKS)]
    dist.all_gather(into, mine(rank.RANK).to(where))
    for each, tensor in enumerate(into):
        torch.testing.assert_close(tensor.cpu(), mine(each))


def reduce_scatter(where: torch.device) -> None:
    parts = [mine(rank.RANK + each).to(where) for each in range(rank.RANKS)]
    if dist.get_backend() == "gloo":
        return  # older releases of Gloo lack it
    output = torch.empty(_COUNT, device=where)
    dist.reduce_scatter(output, parts)
    torch.testing.assert_close(output.cpu(), sum(mine(each + rank.RANK) for each in range(rank.RANKS)))


def all_to_all(where: torch.device) -> None:
    if dist.get_backend() != "nccl":
        return
    out = [torch.empty(_COUNT, device=where) for _ in range(rank.RANKS)]
    dist.all_to_all(out, [mine(10 * rank.RANK + each).to(where) for each in range(rank.RANKS)])
    for each, tensor in enumerate(out):
        torch.testing.assert_close(tensor.cpu(), mine(10 * each + rank.RANK))


def send_and_receive(where: torch.device) -> None:
    after, before = (rank.RANK + 1) % rank.RANKS, (rank.RANK - 1) % rank.RANKS
    into = torch.empty(_COUNT, device=where)
    operations = [
        dist.P2POp(dist.isend, mine(rank.RANK).to(where), after),
        dist.P2POp(dist.irecv, into, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    torch.testing.assert_close(into.cpu(), mine(before))


def objects(_where: torch.device) -> None:
    found: list[object] = [None] * rank.RANKS
    dist.all_gather_object(found, {"rank": rank.RANK})
    assert found == [{"rank": each} for each in range(rank.RANKS)], found


def in_a_second_group(where: torch.device) -> None:
    """Two communicators at the same time, as with a model of two process groups."""
    other = dist.new_group(list(range(rank.RANKS)))
    first, second = mine(rank.RANK).to(where), mine(rank.RANK + 5).to(where)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, group=other, async_op=True)]
    for work in works:
        work.wait()
    torch.testing.assert_close(first.cpu(), sum(mine(each) for each in range(rank.RANKS)))
    torch.testing.assert_close(second.cpu(), sum(mine(each + 5) for each in range(rank.RANKS)))


def barrier(_where: torch.device) -> None:
    dist.barrier()


CHECKS = (
    *(all_reduce, all_reduce_max, broadcast, all_gather, reduce_scatter, all_to_all, send_and_receive),
    *(objects, in_a_second_group, barrier),
)


def main() -> None:
    where = rank.join()
    wanted = sys.argv[1:] or [check.__name__ for check in CHECKS]
    for check in CHECKS:
        if check.__name__ in wanted:
            check(where)
            rank.synchronize()
            print(f"rank {rank.RANK}: {check.__name__} is right", flush=True)
    rank.leave()


if __name__ == "__main__":
    main()
