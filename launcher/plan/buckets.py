"""Which gradients are reduced together, and when a bucket is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.plan.profile import Gradient

MIB = 1024 * 1024
FIRST_BYTES = MIB  # DDP's first bucket is small, so that communication begins early
DEFAULT_CAP_MB = 25.0
CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 400.0)


@dataclass(frozen=True)
class Bucket:
    nbytes: int
    ready_s: float


def buckets_of(gradients: Sequence[Gradient], cap_mb: float = DEFAULT_CAP_MB) -> tuple[Bucket, ...]:
    """DDP's rule: a bucket is closed with the gradient that reaches its limit, in the order of arrival."""
    made: list[Bucket] = []
    limit, nbytes, ready = min(FIRST_BYTES, int(cap_mb * MIB)), 0, 0.0
    for gradient in gradients:
        nbytes, ready = nbytes + gradient.nbytes, max(ready, gradient.ready_s)
        if nbytes >= limit:
            made.append(Bucket(nbytes, ready))
            limit, nbytes = int(cap_mb * MIB), 0
    return (*made, Bucket(nbytes, ready)) if nbytes else tuple(made)
