"""Decides which CPUs each rank of a node runs on. Without I/O: the input is a topology, the output is CPU numbers.

There are two options.

`--numa-binding MODE` keeps a rank near its GPU. The GPU whose index is the local rank has a local NUMA node. The mode
decides how much of that node the rank gets: the whole node (node), the whole socket (socket), an equal part of the
physical cores, not shared with the ranks of other GPUs (exclusive), or one group of cores around one last-level cache
(core-complex). The results equal torchrun's on the same machine. Without GPUs the local ranks are spread evenly over
the nodes, and neighbours share a node. With 4 ranks on two nodes, ranks 0 and 1 get the first node, and 2 and 3 the
second. With 2 ranks on four nodes, they get the first and the third.

`--cpu-affinity` divides a machine without GPUs among its ranks. Each rank gets a separate range of consecutive physical
cores, with all hardware threads of a core. There are two layouts; the launcher uses the layout in which the rank with
the fewest cores has more cores. In the first, every rank stays inside one NUMA node, and each rank is put on the node
where the cores per rank remain highest. In the second, ranks get whole nodes, which helps with fewer ranks than nodes.
A NUMA node with few CPUs may remain unused. In a data-parallel step all ranks wait for the slowest one, so a small
share costs more than a few idle cores.

Only CPUs that the launcher may use are considered. The lowest CPU identifies a core or cache, even if the
launcher may not use that CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar, assert_never

from rendezvous.values.late_dataclass import dataclass

T = TypeVar("T")
Core = list["Cpu"]


class BindingError(ValueError):
    def __init__(self, what: str, why: str, cure: str) -> None:
        super().__init__(f"{what}: {why}; {cure}")
        self.what = what
        self.why = why
        self.cure = cure


class BindingMode(StrEnum):
    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


@dataclass(frozen=True, slots=True)
class Cpu:
    index: int
    core: int
    cache: int  # the largest data cache
    node: int
    socket: int


@dataclass(frozen=True, slots=True)
class CpuTopology:
    cpus: tuple[Cpu, ...]  # those that the launcher may use, in order of index; at least one
    gpu_nodes: tuple[int, ...] = ()  # NUMA node of each GPU, in the order in which ranks count them


@dataclass(frozen=True, slots=True)
class CpuShares:
    cpus: tuple[tuple[int, ...], ...]  # by local rank
    warning: str = ""


def cpus_for_rank(topology: CpuTopology, mode: str, local_rank: int, nproc: int) -> tuple[int, ...]:
    if mode not in tuple(BindingMode):
        raise BindingError(f"--numa-binding {mode}", "unknown mode", f"use one of {', '.join(BindingMode)}")
    what = f"--numa-binding {mode}: no CPU is left for local rank {local_rank}"
    homes = topology.gpu_nodes or _spread_over_nodes(topology, nproc)
    at_home = _cpus_at_home(topology, homes, local_rank, what)
    home = homes[local_rank]
    turn = homes[:local_rank].count(home)
    match BindingMode(mode):
        case BindingMode.NODE:
            return _indexes(at_home)
        case BindingMode.SOCKET:
            return _indexes(_on_socket_of(topology, home))
        case BindingMode.EXCLUSIVE:
            return _indexes(_exclusive_cores(at_home, turn, homes.count(home), what))
        case BindingMode.CORE_COMPLEX:
            return _indexes(_core_complex(at_home, turn))
        case _ as never:
            assert_never(never)


def _cpus_at_home(topology: CpuTopology, homes: tuple[int, ...], local_rank: int, what: str) -> list[Cpu]:
    if local_rank >= len(homes):
        raise BindingError(
            what,
            f"each rank needs its own GPU, but only {len(homes)} GPUs are visible",
            f"use --nproc-per-node {len(homes)} or omit --numa-binding",
        )
    home = homes[local_rank]
    at_home = [cpu for cpu in topology.cpus if cpu.node == home]
    if not at_home:
        raise BindingError(
            what,
            f"its GPU is on NUMA node {home}, but this job may not use CPUs of that node",
            "allow CPUs of that node (taskset, cpuset, scheduler) or omit --numa-binding",
        )
    return at_home


def share_cpus(topology: CpuTopology, nproc: int) -> CpuShares:
    nodes = [_cores([cpu for cpu in topology.cpus if cpu.node == node]) for node in _nodes(topology)]
    cores = [core for node in nodes for core in node]
    if nproc > len(cores):
        return CpuShares(
            tuple(_indexes(cores[rank % len(cores)]) for rank in range(nproc)),
            f"--cpu-affinity: {nproc} ranks share {len(cores)} physical core{'s' * (len(cores) > 1)}, "
            f"and will slow each other down; use --nproc-per-node {len(cores)} or fewer",
        )
    shares = max(_within_nodes(nodes, nproc), _whole_nodes(nodes, nproc), key=_poorest_then_total)
    return CpuShares(tuple(_indexes(cpu for core in share for cpu in core) for share in shares))


def omp_threads(cpus: Sequence[int], topology: CpuTopology) -> int:
    """Return one thread per physical core: a second thread on the same core only competes for its vector units."""
    mine = frozenset(cpus)
    return max(1, len({cpu.core for cpu in topology.cpus if cpu.index in mine}))


def _indexes(cpus: Iterable[Cpu]) -> tuple[int, ...]:
    return tuple(sorted(cpu.index for cpu in cpus))


def _nodes(topology: CpuTopology) -> list[int]:
    """List the nodes with usable CPUs, socket by socket, so that neighbouring ranks are near each other."""
    sockets = _socket_of_nodes(topology)
    return sorted(sockets, key=lambda node: (sockets[node], node))


def _socket_of_nodes(topology: CpuTopology) -> dict[int, int]:
    """Map each node to the socket of its lowest CPU. Some firmware presents two sockets as one node."""
    sockets: dict[int, int] = {}
    for cpu in topology.cpus:
        sockets.setdefault(cpu.node, cpu.socket)
    return sockets


def _spread_over_nodes(topology: CpuTopology, nproc: int) -> tuple[int, ...]:
    nodes = _nodes(topology)
    return tuple(nodes[rank * len(nodes) // nproc] for rank in range(nproc))


def _on_socket_of(topology: CpuTopology, home: int) -> list[Cpu]:
    sockets = _socket_of_nodes(topology)
    return [cpu for cpu in topology.cpus if sockets[cpu.node] == sockets[home]]


def _exclusive_cores(at_home: list[Cpu], turn: int, sharers: int, what: str) -> list[Cpu]:
    cores = _cores(at_home)
    if len(cores) < sharers:
        raise BindingError(
            what,
            f"NUMA node {at_home[0].node} has only {len(cores)} usable physical cores for {sharers} ranks",
            "use --numa-binding node, or allow more CPUs",
        )
    return [cpu for core in _even_runs(cores, sharers)[turn] for cpu in core]


def _core_complex(at_home: list[Cpu], turn: int) -> list[Cpu]:
    """Take the complexes with the most usable CPUs first. Ranks share them in turn if there are too few."""
    complexes = sorted(_grouped(at_home, lambda cpu: cpu.cache), key=len, reverse=True)
    return complexes[turn % len(complexes)]


def _cores(cpus: list[Cpu]) -> list[Core]:
    return _grouped(cpus, lambda cpu: cpu.core)


def _grouped(cpus: list[Cpu], name_of: Callable[[Cpu], int]) -> list[Core]:
    groups: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        groups.setdefault(name_of(cpu), []).append(cpu)
    return [groups[name] for name in sorted(groups)]


def _even_runs(things: list[T], count: int) -> list[list[T]]:
    """Split into `count` consecutive ranges. If the division has a remainder, the first ranges are longer by one."""
    length, longer = divmod(len(things), count)
    ends = [run * length + min(run, longer) for run in range(count + 1)]
    return [things[start:end] for start, end in pairwise(ends)]


def _within_nodes(nodes: list[list[Core]], nproc: int) -> list[list[Core]]:
    ranks = [0] * len(nodes)
    for _ in range(nproc):
        roomiest = max(range(len(nodes)), key=lambda node: len(nodes[node]) / (ranks[node] + 1))
        ranks[roomiest] += 1
    return [
        share for node, count in zip(nodes, ranks, strict=True) if count for share in _even_runs(node, count)
    ]


def _whole_nodes(nodes: list[list[Core]], nproc: int) -> list[list[Core]]:
    return [[core for node in run for core in node] for run in _even_runs(nodes, nproc)]


def _poorest_then_total(shares: list[list[Core]]) -> tuple[int, int]:
    sizes = [len(share) for share in shares]
    return min(sizes), sum(sizes)
