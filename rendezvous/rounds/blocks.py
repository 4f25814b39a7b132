"""Neighbouring node ranks for nodes that share a part of the network. Pure.

A node may say where it is in the network, as a path from the largest unit to the smallest: "pod1/rack7" (`--topology`).
Nodes whose paths begin alike are close. Collectives exchange most data between neighbouring ranks, so close nodes get
neighbouring ranks. A node without a path is close to no other one. Without any paths the order is the one of before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")
Path = tuple[str, ...]
_DEPTH = 8


def path_of(block: str) -> Path:
    return tuple(part for part in block.split("/") if part)[:_DEPTH]


def grouped(nodes: Sequence[T], path: Callable[[T], Path]) -> list[T]:
    """Bring nodes with the same beginnings together. `nodes` are in their usual order, which decides everything else: a
    group stands where its first node stood, and inside a group the order stays.
    """
    groups: dict[object, list[T]] = {}
    for place, node in enumerate(nodes):
        here = path(node)
        groups.setdefault(here[:1] or place, []).append(node)  # a node without a path: a group of its own
    return [
        node
        for members in groups.values()
        for node in (grouped(members, lambda each: path(each)[1:]) if len(members) > 1 else members)
    ]


def seated(free: Iterable[int], taken: Mapping[int, Path], queue: Sequence[Path]) -> list[tuple[int, int]]:
    """Pairs of a free rank and the index of its node in `queue`.

    Each rank goes to the node that shares the longest beginning with one of its neighbours. If two are as good, the
    one that fits the neighbour before goes first; then the first of the queue.
    """
    waiting: dict[Path, deque[int]] = {}
    for index, path in enumerate(queue):
        for length in range(len(path) + 1):
            waiting.setdefault(path[:length], deque()).append(index)
    ranks, seated_already, pairs = dict(taken), set[int](), []
    for rank in free:
        near = [ranks.get(rank - 1, ()), ranks.get(rank + 1, ())]
        index = _closest(near, waiting, seated_already)
        seated_already.add(index)
        ranks[rank] = queue[index]
        pairs.append((rank, index))
    return pairs


def _closest(near: Sequence[Path], waiting: Mapping[Path, deque[int]], seated_already: set[int]) -> int:
    for length in range(max(map(len, near)), -1, -1):
        for prefix in dict.fromkeys(path[:length] for path in near if len(path) >= length):
            line = waiting.get(prefix, deque())
            while line and line[0] in seated_already:
                line.popleft()
            if line:
                return line[0]
    raise AssertionError("internal error: fewer nodes than free ranks")
