"""What the plan predicts for each number of nodes, and what it advises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from ddp_launch_wings.plan import step_model
from ddp_launch_wings.plan.step_model import (
    CAPS_MB,
    DEFAULT_CAP_MB,
    Cluster,
    Link,
    Profile,
    StepTime,
    Transport,
)

CADENCES = (1, 2, 4, 8, 16, 32)
EFFICIENT = 0.9
# Other bucket sizes are only named if they make a step shorter by this share. The model is not more precise.
_MARGIN = 0.03


@dataclass(frozen=True)
class Question:
    """What is asked: the job, the cluster, and the failures."""

    profile: Profile
    ranks_per_node: int
    link: Link
    inside: Link
    transport: Transport
    failures: FailureModel
    diloco_every: int

    def cluster(self, nodes: int) -> Cluster:
        return Cluster(nodes, self.ranks_per_node, self.link, self.inside)


@dataclass(frozen=True)
class Prediction:
    nodes: int
    ranks: int
    step: StepTime  # with DDP's defaults
    best_cap_mb: float
    best: StepTime  # with the best size of buckets
    cadence: (
        int | None
    )  # micro-batches between two averages for an efficiency of 0.9; None: even the largest is less
    hsdp: StepTime
    diloco: StepTime
    goodput: Goodput

    @property
    def best_method(self) -> str:
        """DDP, unless another method is clearly faster."""
        limit = self.best.seconds * (1 - _MARGIN)
        others = {"HSDP": self.hsdp.seconds, "DiLoCo": self.diloco.seconds}
        name = min(others, key=others.__getitem__)
        return name if others[name] < limit else "DDP"


def predict(question: Question, node_counts: Sequence[int]) -> tuple[Prediction, ...]:
    return tuple(_for(question, nodes) for nodes in node_counts)


def _for(question: Question, nodes: int) -> Prediction:
    cluster, profile, transport = question.cluster(nodes), question.profile, question.transport
    by_cap = {cap: step_model.ddp(profile, cluster, transport, cap) for cap in CAPS_MB}
    default = by_cap[DEFAULT_CAP_MB]
    best = min(CAPS_MB, key=lambda cap: (by_cap[cap].seconds, cap))
    if by_cap[best].seconds > default.seconds * (1 - _MARGIN):
        best = DEFAULT_CAP_MB
    steps = ((each, step_model.ddp(profile, cluster, transport, best, each)) for each in CADENCES)
    return Prediction(
        nodes,
        cluster.ranks,
        default,
        best,
        by_cap[best],
        next((each for each, step in steps if step.efficiency >= EFFICIENT), None),
        step_model.hsdp(profile, cluster, transport),
        step_model.diloco(profile, cluster, transport, question.diloco_every),
        goodput(question.failures, nodes),
    )


# --- what failures and checkpoints cost over time ---------------------------------------------------
#
# With one failure every M seconds in the whole job, a checkpoint every T seconds that stops training for d seconds, and
# R seconds from a failure to the next training step, the share of time that trains is
#
#     goodput = 1 / (1 + d/T + (R + T/2) / M)
#
# because a failure loses half an interval on average. T = sqrt(2 d M) makes it largest (Young's formula).


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
