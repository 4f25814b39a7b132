"""Logical ranks: which process carries which of them, and the one order in which their gradients are summed.

N logical ranks are numbered from 0. A world of P processes divides them into P adjacent blocks.

The sum over all logical ranks is a binary tree over their numbers: (0 + 1) + (2 + 3), and so on; in a row with an odd
number of sums, the last one moves up as it is. A *node* (level, index) is the sum of the logical ranks from
index * 2^level on, of which there are 2^level, or fewer at the end of the row. Floating-point addition is commutative,
but not associative. So the bits of the total depend only on this tree, not on who adds its nodes, or when.

A process adds what it can: the nodes whose parts are all in its block. The fewest such nodes are the *cover* of the
block. If P divides N and N / P is a power of two, each cover is one node, and the rest of the tree is a tree over the
processes in the order of their ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ddp.elastic.sample_order import mixed
from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
Node = tuple[int, int]


def block(logical_world: int, rank: int, processes: int) -> range:
    """The logical ranks of a process. Blocks differ by at most one rank if the number of processes is not a divisor."""
    return range(rank * logical_world // processes, (rank + 1) * logical_world // processes)


def check_size(logical_world: int, processes: int) -> None:
    if logical_world < 1:
        raise WrongValue(f"invalid logical world {logical_world}. Use a number of logical ranks of 1 or more")
    if processes > logical_world:
        raise WrongValue(
            f"{processes} processes cannot carry {logical_world} logical ranks: each process needs at least one. Start "
            f"at most {logical_world} processes, or use a larger logical world from the beginning of the training"
        )


def raised(node: Node, logical_world: int) -> Node:
    """The highest node with the same sum: a node without a right neighbour moves up as it is."""
    level, index = node
    while index % 2 == 0 and index > 0 and (index + 1) << level >= logical_world:
        level, index = level + 1, index // 2
    return level, index


def parent(left: Node, right: Node, logical_world: int) -> Node | None:
    """The node that is the sum of two nodes, if there is one."""
    (level, index), (other, following) = left, right
    if level != other or following != index + 1 or index % 2:
        return None
    return raised((level + 1, index // 2), logical_world)


def cover(ranks: range, logical_world: int) -> tuple[Node, ...]:
    """The fewest nodes that are sums of these logical ranks, in their order."""
    found: list[Node] = []
    for rank in ranks:
        found.append(raised((0, rank), logical_world))
        while len(found) > 1 and (joined := parent(found[-2], found[-1], logical_world)) is not None:
            found[-2:] = [joined]
    return tuple(found)


def covers(logical_world: int, processes: int) -> tuple[tuple[Node, ...], ...]:
    """The cover of each process."""
    return tuple(cover(block(logical_world, rank, processes), logical_world) for rank in range(processes))


def is_tree_of_processes(logical_world: int, processes: int) -> bool:
    """Whether the rest of the tree is the binary tree over the processes, in the order of their ranks."""
    each, rest = divmod(logical_world, processes)
    return not rest and each.bit_count() == 1


def total(parts: Mapping[Node, T], logical_world: int, add: Callable[[T, T], T]) -> T:
    """Add the nodes of all covers."""
    found: list[tuple[Node, T]] = []
    for node in sorted(parts, key=lambda node: node[1] << node[0]):
        found.append((node, parts[node]))
        while len(found) > 1 and (joined := parent(found[-2][0], found[-1][0], logical_world)) is not None:
            (_left, a), (_right, b) = found[-2:]
            found[-2:] = [(joined, add(a, b))]
    ((_root, whole),) = found
    return whole


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Add one value for each logical rank."""
    return total({raised((0, rank), len(parts)): part for rank, part in enumerate(parts)}, len(parts), add)


# --- seeds -----------------------------------------------------------------------------------------


def seed_of_step(seed: int, step: int, logical_rank: int, logical_world: int, stream: int) -> int:
    """The seed of a logical rank in a step; `stream` is 0 or 1.

    torch's generator on the CPU uses only the low 32 bits of a seed. Here they are a permutation of a counter, so the
    first 2^32 seeds of a job differ in them. Random numbers of 32 bits would meet after some 80,000 seeds.
    """
    counter = (step * logical_world + logical_rank) * 2 + stream
    low = _permuted((mixed(seed) + counter) & 0xFFFFFFFF)
    return mixed(seed, step, logical_rank, stream) & ~0xFFFFFFFF | low


def _permuted(number: int) -> int:
    """The last steps of the hash function Murmur3, for 32 bits."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
