"""Binding decided on plain values: machines are written as rows of cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks.affinity import (
    BindingError,
    Cpu,
    CpuShares,
    CpuTopology,
    cpus_for_rank,
    omp_threads,
    share_cpus,
)


def machine(
    *cores_per_node: int, threads: int = 1, nodes_per_socket: int = 1, gpus: tuple[int, ...] = ()
) -> CpuTopology:
    """Numbered as Linux does on x86: first threads of all cores, then second threads; caches of 4 cores."""
    total = sum(cores_per_node)
    node_of = [node for node, cores in enumerate(cores_per_node) for _ in range(cores)]
    cpus = tuple(
        Cpu(thread * total + core, core, core - core % 4, node_of[core], node_of[core] // nodes_per_socket)
        for thread in range(threads)
        for core in range(total)
    )
    return CpuTopology(cpus, gpus)


def allowed(topology: CpuTopology, *indexes: int) -> CpuTopology:
    return CpuTopology(tuple(cpu for cpu in topology.cpus if cpu.index in indexes), topology.gpu_nodes)


def bound(topology: CpuTopology, mode: str, nproc: int) -> list[tuple[int, ...]]:
    return [cpus_for_rank(topology, mode, rank, nproc) for rank in range(nproc)]


def test_each_mode_beside_its_gpu() -> None:
    two_sockets = machine(4, 4, 4, 4, nodes_per_socket=2, gpus=(3, 0, 3))
    assert bound(two_sockets, "node", 3) == [(12, 13, 14, 15), (0, 1, 2, 3), (12, 13, 14, 15)]
    assert bound(two_sockets, "socket", 3) == [tuple(range(8, 16)), tuple(range(8)), tuple(range(8, 16))]
    assert bound(two_sockets, "exclusive", 3) == [(12, 13), (0, 1, 2, 3), (14, 15)]
    assert bound(machine(8, gpus=(0, 0, 0)), "core-complex", 3) == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]


def test_exclusive_keeps_threads_of_a_core_together_and_gives_the_first_the_odd_core() -> None:
    assert bound(machine(3, threads=2, gpus=(0, 0)), "exclusive", 2) == [(0, 1, 3, 4), (2, 5)]


def test_the_core_complex_with_most_usable_cpus_goes_first() -> None:
    topology = allowed(machine(8, gpus=(0, 0)), 3, 4, 5, 6)
    assert bound(topology, "core-complex", 2) == [(4, 5, 6), (3,)]


@pytest.mark.parametrize(
    ("nproc", "first_cpus"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (4, [0, 2, 4, 6]), (5, [0, 0, 2, 4, 6])]
)
def test_without_gpus_ranks_spread_over_the_nodes(nproc: int, first_cpus: list[int]) -> None:
    cpus = bound(machine(2, 2, 2, 2), "node", nproc)
    assert cpus == [(first, first + 1) for first in first_cpus]


def test_without_gpus_modes_divide_a_node_among_its_ranks() -> None:
    assert bound(machine(4, 4), "exclusive", 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("topology", "mode", "says"),
    [
        (
            machine(4, gpus=(0,)),
            "node",
            r"local rank 1: each rank needs its own GPU, but only 1 GPUs are visible; use --nproc-per-node 1",
        ),
        (
            machine(1, gpus=(0, 0)),
            "exclusive",
            r"NUMA node 0 has only 1 usable physical cores for 2 ranks; use",
        ),
        (machine(4, gpus=(0, 7)), "socket", r"its GPU is on NUMA node 7, but .*; allow CPUs"),
        (machine(4), "nod", r"--numa-binding nod: unknown mode; use one of node, socket, excl"),
    ],
)
def test_the_impossible_is_told_with_why_and_cure(topology: CpuTopology, mode: str, says: str) -> None:
    with pytest.raises(BindingError, match=says):
        cpus_for_rank(topology, mode, 1, 2)


def test_one_cpu_serves_any_mode() -> None:
    for mode in ("node", "socket", "exclusive", "core-complex"):
        assert cpus_for_rank(machine(1), mode, 0, 1) == (0,)


@pytest.mark.parametrize(
    ("topology", "nproc", "shares"),
    [
        (machine(1), 1, [(0,)]),
        (machine(4, threads=2), 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (machine(5), 2, [(0, 1, 2), (3, 4)]),
        (machine(4, 4), 1, [(0, 1, 2, 3, 4, 5, 6, 7)]),  # one rank has to cross
        (machine(2, 2, 2, 2), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (machine(4, 4), 3, [(0, 1), (2, 3), (4, 5, 6, 7)]),  # 3+3+2 would cross and help nobody
        (machine(6, 2), 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),  # as many ranks as a node can feed
        (machine(15, 1), 2, [tuple(range(8)), tuple(range(8, 15))]),  # a rank alone on 1 core would brake
        (allowed(machine(4, 4), 1, 3, 6, 7), 2, [(1, 3), (6, 7)]),
    ],
)
def test_shares_of_a_cpu_only_machine(
    topology: CpuTopology, nproc: int, shares: list[tuple[int, ...]]
) -> None:
    assert share_cpus(topology, nproc) == CpuShares(tuple(shares))


def test_sockets_stay_together_whatever_the_order_of_their_nodes() -> None:
    cpus = tuple(Cpu(index, index, index, node=index, socket=index % 2) for index in range(4))
    assert share_cpus(CpuTopology(cpus), 2).cpus == ((0, 2), (1, 3))


def test_more_ranks_than_cores_take_turns_and_hear_of_it() -> None:
    shares = share_cpus(machine(2, threads=2), 5)
    assert shares.cpus == ((0, 2), (1, 3), (0, 2), (1, 3), (0, 2))
    assert "5 ranks share 2 physical cores" in shares.warning
    assert "share 1 physical core," in share_cpus(machine(1), 2).warning


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 2), st.integers(1, 20), st.data())
def test_shares_are_disjoint_whole_cores_and_cross_nodes_only_when_ranks_are_few(
    nodes: list[int], threads: int, nproc: int, data: st.DataObject
) -> None:
    whole = machine(*nodes, threads=threads)
    indexes = data.draw(st.sets(st.sampled_from([cpu.index for cpu in whole.cpus]), min_size=1))
    topology = allowed(whole, *indexes)
    shares = share_cpus(topology, nproc)
    assert len(shares.cpus) == nproc
    by_index = {cpu.index: cpu for cpu in topology.cpus}
    cores = [tuple(dict.fromkeys(by_index[index].core for index in share)) for share in shares.cpus]
    assert all(cores)
    for share in shares.cpus:
        mine = {by_index[index].core for index in share}
        assert set(share) == {cpu.index for cpu in topology.cpus if cpu.core in mine}
    if shares.warning:
        assert nproc > omp_threads(tuple(by_index), topology)
        return
    dealt = [core for share in cores for core in share]
    assert len(dealt) == len(set(dealt))
    if nproc >= len({cpu.node for cpu in topology.cpus}):
        assert all(len({by_index[index].node for index in share}) == 1 for share in shares.cpus)


def test_omp_threads_counts_cores_not_threads() -> None:
    topology = machine(4, threads=2)
    assert omp_threads((0, 1, 4, 5), topology) == 2
    assert omp_threads((4,), topology) == 1
