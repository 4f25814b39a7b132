"""Chunks are runs of neighbours in a bucket that are gathered together. `Mode` selects the watched gradients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddp.reducer.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.plan import BucketPlan, ParameterFacts

# A hook and two calls cost more than a smaller chunk saves.
CHUNK_BYTES = 128 * 1024


class Mode(Enum):
    OBSERVE = "every parameter is watched, all is sent at the end"
    COUNT = "every parameter is watched, buckets are sent when they are full"
    SENTINEL = "one parameter of each chunk is watched"


@dataclass(frozen=True)
class Chunk:
    bucket: int
    start: int
    end: int
    members: tuple[int, ...]


def cut(plan: BucketPlan, parameters: Sequence[ParameterFacts]) -> list[Chunk]:
    chunks = []
    for number, bucket in enumerate(plan.buckets):
        start, filled = 0, 0
        for i, member in enumerate(bucket.members):
            filled += parameters[member].nbytes
            last = i + 1 == len(bucket.members)
            if last or (filled >= CHUNK_BYTES and bucket.kind is Kind.FLAT):
                chunks.append(Chunk(number, start, i + 1, bucket.members[start : i + 1]))
                start, filled = i + 1, 0
    return chunks
