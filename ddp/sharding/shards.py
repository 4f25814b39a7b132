"""Who owns which elements of a bucket: each rank one shard of equal size, cut without regard to parameters.

A piece is what one parameter and one shard have in common. The last shards may be shorter than the others, or empty,
as far as pieces go: the bucket is thought to go on behind its end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a parameter, as they lie in memory; `offset`: where they begin in the shard."""

    member: int  # of the bucket
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Shard:
    size: int  # the same for all ranks
    begin: int  # in the bucket
    pieces: tuple[Piece, ...]


def shard(sizes: Sequence[int], world_size: int, rank: int) -> Shard:
    """`sizes`: how many elements each member of the bucket has."""
    size = -(-sum(sizes) // world_size)
    begin, end = size * rank, size * (rank + 1)
    pieces = []
    for member, (first, last) in enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=0))):
        low, high = max(begin, first), min(end, last)
        if low < high:
            pieces.append(Piece(member, low - first, high - first, low - begin))
    return Shard(size, begin, tuple(pieces))
