"""Assign the elements of a bucket to ranks. Each rank owns one shard of equal size.

Shard boundaries ignore parameter boundaries. A piece is the intersection of one parameter and one shard. The bucket
is padded to a multiple of the shard size, so the last shards may own fewer elements or none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a parameter in memory order. `offset` is their position in the shard."""

    member: int  # index in the bucket
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Shard:
    size: int  # the same for all ranks
    begin: int  # position in the bucket
    pieces: tuple[Piece, ...]


def shard(sizes: Sequence[int], world_size: int, rank: int) -> Shard:
    """Return the shard of a rank. `sizes`: the number of elements of each member of the bucket."""
    size = -(-sum(sizes) // world_size)
    begin, end = size * rank, size * (rank + 1)
    pieces = []
    for member, (first, last) in enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=0))):
        low, high = max(begin, first), min(end, last)
        if low < high:
            pieces.append(Piece(member, low - first, high - first, low - begin))
    return Shard(size, begin, tuple(pieces))
