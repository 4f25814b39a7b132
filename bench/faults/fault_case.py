"""What a case of the suite is: what is done to a job, and what has to be said of it.

`blamed` is who the verdict must name, and nobody else. Where nobody can know who it was (`certain` False), the
verdict may name those who are involved, and must not call any of them guilty.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    DEATH = "death"
    HANG = "hang"
    NODE = "node"  # a machine or its agent is gone
    NCCL = "nccl"  # an error of the communication library, on the backend that behaves as NCCL does
    INNOCENT = "innocent"  # nothing may be done about it


# From the fault until all ranks of the next generation have done a step.
HANG_TIMEOUT_S = 3.0
SILENCE_S = 4.0  # of a node whose ranks have trained ...
REGULARLY_S = 17.0  # ... for longer than a lease
DEATH_BOUND_S = 1.0
HANG_BOUND_S = 2 * HANG_TIMEOUT_S
NODE_BOUND_S = 2 * SILENCE_S
NCCL_BOUND_S = 1.5  # the watchdog and the guard each look ten times per second


@dataclass(frozen=True)
class Case:
    name: str
    injected: str  # in words, for the table
    says: str  # a regular expression that the verdict matches
    kind: Kind = Kind.HANG
    fault: str = ""  # NAME@PLACE of programs/faults.py
    commits: tuple[int, ...] = (1,)  # the ranks that do it
    blamed: tuple[int, ...] | None = (1,)  # None: whoever is named, as long as it is not certain
    certain: bool | None = True  # None: either will do
    outside: str = ""  # what is done to the job from outside: a function of outside.py
    wrap: str = "torch"
    backend: str = "gloo"
    device: str = "cpu"
    loaders: int = 0
    ranks: int = 3  # per node
    nodes: int = 1
    has_service: bool = False  # in a process of its own; else the first agent serves
    options: tuple[str, ...] = ()
    script_options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    in_lab: bool = False  # each node is a host with a network of its own
    trains_s: float = 0.0  # for so long before it happens
    bound_s: float | None = None
    needs: str = ""  # what not every machine has: a function of needs.py
    heals: bool = (
        True  # it strikes while all ranks are inside `State.run`, and what is said there is the same
    )
    keeps: bool = True  # in place all others keep their processes

    @property
    def is_played_in_place(self) -> bool:
        return self.heals and self.kind is not Kind.INNOCENT and self.device == "cpu"

    @property
    def survivors(self) -> frozenset[int]:
        """The ranks that are to keep their processes in place: those that did nothing, where they can go on."""
        guilty = set(self.blamed or ()) | set(self.commits if self.fault and not self.outside else ())
        loses_node = self.kind is Kind.NODE or self.outside == "kill_node"
        left = self.ranks * (self.nodes - loses_node)
        return frozenset(rank for rank in range(left) if rank not in guilty)

    @property
    def may_take_s(self) -> float:
        bounds = {Kind.DEATH: DEATH_BOUND_S, Kind.NODE: NODE_BOUND_S, Kind.NCCL: NCCL_BOUND_S}
        return self.bound_s or bounds.get(self.kind, HANG_BOUND_S)

    @property
    def is_over_soon(self) -> bool:
        """Its time is that of a death, not that of a wait: nothing else may start meanwhile."""
        return self.kind is Kind.DEATH or (self.kind is Kind.NCCL and self.bound_s is None)

    @property
    def where(self) -> str:
        """The setting, as the table shows it."""
        wrapper = {"torch": "torch DDP", "ours": "our DDP", "plain": "no DDP"}[self.wrap]
        nodes = (
            f"{self.nodes} nodes of {self.ranks}"
            if self.nodes > 1
            else f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        )
        cold = ["no warm start"] if "--no-warm-start" in self.options else []
        hosts = ["separate networks"] if self.in_lab else []
        device = [] if self.device == "cpu" else ["on GPUs"]
        return ", ".join([wrapper, self.backend, nodes, *device, *hosts, *cold])
