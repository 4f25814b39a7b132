"""A chunk is a sequence of adjacent gradients in a bucket that are gathered together.

`Mode` selects which have hooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddp.reducer.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.plan import BucketPlan, ParameterInfo


class Mode(Enum):
    """Which parameters have hooks, and when buckets are sent."""

    OBSERVE = "every parameter has a hook, and all buckets are sent at the end"
    COUNT = "every parameter has a hook, and buckets are sent when they are full"
    SENTINEL = "one parameter of each chunk has a hook"


@dataclass(frozen=True)
class Chunk:
    """The members [start, end) of a bucket. `members` are their parameter indices."""

    bucket: int
    start: int
    end: int
    members: tuple[int, ...]


def cut(plan: BucketPlan, parameters: Sequence[ParameterInfo], chunk_bytes: int) -> list[Chunk]:
    """Cut each flat bucket into chunks of at least `chunk_bytes`, except for its last one."""
    chunks = []
    for number, bucket in enumerate(plan.buckets):
        start, filled = 0, 0
        for i, member in enumerate(bucket.members):
            filled += parameters[member].nbytes
            last = i + 1 == len(bucket.members)
            if last or (filled >= chunk_bytes and bucket.kind is Kind.FLAT):
                chunks.append(Chunk(number, start, i + 1, bucket.members[start : i + 1]))
                start, filled = i + 1, 0
    return chunks


def sentinels(chunks: Sequence[Chunk], order: Sequence[int]) -> dict[int, int]:
    """Return the parameter of each chunk whose gradient arrives last, with the number of the chunk."""
    place = {member: i for i, member in enumerate(order)}
    return {max(chunk.members, key=place.__getitem__): number for number, chunk in enumerate(chunks)}
