"""The faults that a rehearsal can play, and the steps at which it plays them. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from rendezvous.values.late_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class FaultKind:
    name: str
    words: str  # what happens, with {rank}, {node} and {step}
    act: str  # of `recorder.Fault`
    needs: str = ""  # "nodes": several agents; "disk", "network": what only root may do


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "rank {rank} is killed in step {step}", "kill"),
        FaultKind("kill-0", "rank 0 is killed in step {step}", "kill"),
        FaultKind("freeze", "rank {rank} is stopped in step {step} (SIGSTOP)", "freeze"),
        FaultKind("slow", "rank {rank} takes four times as long from step {step} on", "slow_down"),
        FaultKind("nan", "the gradient of a parameter becomes NaN in step {step}", "nan"),
        FaultKind("disk", "the disk is full from step {step} on, for two steps", "fill_disk", "disk"),
        FaultKind(
            "sigterm", "the scheduler ends the job with SIGTERM in step {step}, and starts it again", "wait"
        ),
        FaultKind(
            "node", "node {node} loses its processes in step {step}, and another node comes", "wait", "nodes"
        ),
        FaultKind("freeze-node", "all processes of node {node} are stopped in step {step}", "wait", "nodes"),
        FaultKind("network", "node {node} loses its network in step {step}, for 20 s", "wait", "network"),
    )
}
USUAL = ("kill", "kill-0", "sigterm")


@dataclass(frozen=True, slots=True)
class Play:
    """One fault of one run. `rank` is None if all ranks play it."""

    kind: FaultKind
    rank: int | None
    node: int
    step: int
    moment: str  # "forward" or "optimizer"

    @property
    def words(self) -> str:
        return self.kind.words.format(rank=self.rank, node=self.node, step=self.step)


def plan(
    names: Sequence[str], seed: int, steps: int, ranks: int, nodes: int, fixed: int | None = None
) -> Iterator[Play]:
    """Choose a rank, a step and a moment for each fault. The same seed and sizes give the same plan.

    `steps`: of the undisturbed run, at least three. The first step and the last one are left out. `fixed`: the step.
    """
    per_node = ranks // nodes
    for place, name in enumerate(names):
        kind = KINDS[name]

        def draw(what: str, first: int, end: int, place: int = place, name: str = name) -> int:
            number = zlib.crc32(f"{seed} {place} {name} {what}".encode())
            return first + number % max(1, end - first)

        node = draw("node", 1, nodes) if nodes > 1 else 0
        rank: int | None
        if kind.needs in ("nodes", "network"):
            rank = node * per_node
        elif name == "kill-0" or (kind.act == "wait" or name == "disk"):
            rank = 0
        else:
            rank = draw("rank", min(1, ranks - 1), ranks)
        step = fixed if fixed is not None else draw("step", 2, steps)
        moment = "optimizer" if name in ("nan", "slow") else ("forward", "optimizer")[draw("moment", 0, 2)]
        yield Play(kind, None if name == "nan" else rank, node, step, moment)


def missing(kind: FaultKind, nodes: int, is_root: bool, has_tools: bool) -> str:
    """Why this machine or job cannot play the fault; "" if it can."""
    if kind.needs in ("nodes", "network") and nodes < 2:
        return "the job has one node. Use --nnodes 2: the agents of all nodes then run on this machine"
    if kind.needs == "disk" and nodes > 1:
        return "the nodes of a rehearsal share one folder. Play it with one node"
    if kind.needs in ("disk", "network") and not (is_root and has_tools):
        what = "a file system" if kind.needs == "disk" else "networks"
        return f"it needs {what} of its own, which only root may make here, with unshare, mount and ip"
    return ""
