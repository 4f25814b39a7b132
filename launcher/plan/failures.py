"""What failures and checkpoints cost over time.

With one failure every M seconds in the whole job, a checkpoint every T seconds that stops training for d seconds, and
R seconds from a failure to the next training step, the share of time that trains is

    goodput = 1 / (1 + d/T + (R + T/2) / M)

because a failure loses half an interval on average. T = sqrt(2 d M) makes it largest (Young's formula).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class FailureModel:
    node_mtbf_s: float  # the mean time between failures of one node
    restart_s: float  # from the failure to the next training step
    checkpoint_stall_s: float  # how long one checkpoint stops training
    checkpoint_every_s: float | None = None  # None: the best interval


@dataclass(frozen=True)
class Goodput:
    share: float
    checkpoint_every_s: float


def goodput(model: FailureModel, nodes: int) -> Goodput:
    between = model.node_mtbf_s / nodes
    every = model.checkpoint_every_s or sqrt(2 * model.checkpoint_stall_s * between)
    lost = model.checkpoint_stall_s / every + (model.restart_s + every / 2) / between
    return Goodput(1 / (1 + lost), every)
