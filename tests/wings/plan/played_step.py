"""Plays a step message by message: the check of the formulas in `network` and `step_model`.

Each rank has its own computing times. In each step of a ring, a rank sends a part to the next one, and continues when
it has both sent its part and received the one of the rank before. So a slow rank delays its neighbours step by step, as
in a real ring, and not all ranks at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_launch_wings.plan.step_model import BUCKET_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_launch_wings.plan.step_model import Bucket, Link


def play_ring(begins: Sequence[float], link: Link, nbytes: float, collective_s: float = 0.0) -> list[float]:
    """When each rank has finished an all-reduce that it entered at `begins[rank]`."""
    members = len(begins)
    message = link.message(nbytes / members)
    at = [begin + collective_s for begin in begins]
    for _ in range(2 * (members - 1)):
        at = [max(at[rank], at[rank - 1]) + message for rank in range(members)]
    return at


def play_step(
    buckets: Sequence[Bucket],
    slowdowns: Sequence[float],
    rest_s: float,
    link: Link,
    collective_s: float = 0.0,
) -> float:
    """Seconds from the start of a step until the last rank has all averages. Each rank has one factor of slowness."""
    free = [0.0] * len(slowdowns)
    for number, bucket in enumerate(buckets):
        ready = bucket.ready_s + number * BUCKET_S
        begins = [max(free[rank], (rest_s + ready) * factor) for rank, factor in enumerate(slowdowns)]
        free = play_ring(begins, link, bucket.nbytes, collective_s)
    return max(free)
