"""How GPUs are connected, in words, and where a node is in the network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.machine.gpu_state import (
    Device,
    Fabric,
    Gpu,
    Layout,
    NvLink,
    in_words,
    ranges,
)
from launcher.preflight.checkup import Grade, judge_layout, judge_place, place_of
from launcher.settings.options import place
from launcher.settings.values import BadValue


def bus(index: int) -> str:
    return f"0000:{0x18 + index:02x}:00.0"


def gpus(number: int, *pairs: tuple[int, int]) -> tuple[Gpu, ...]:
    """Each pair is connected with two links."""
    found = [Gpu(index, "H100", bus(index)) for index in range(number)]
    for one, other in pairs:
        for here, there in ((one, other), (other, one)):
            more = tuple(NvLink(len(found[here].links) + n, active=True, remote=bus(there)) for n in range(2))
            found[here] = replace(found[here], links=(*found[here].links, *more))
    return tuple(found)


def switched(number: int) -> tuple[Gpu, ...]:
    links = tuple(NvLink(n, active=True, remote="0000:c0:00.0", to_switch=True) for n in range(18))
    return tuple(replace(gpu, links=links) for gpu in gpus(number))


def test_a_machine_with_switches_and_two_numa_nodes() -> None:
    cards = tuple(Device(f"mlx5_{index}", index // 2) for index in range(4))
    layout = Layout(switched(8), (0,) * 4 + (1,) * 4, cards, numa_nodes=2)
    assert in_words(layout) == (
        "8 × H100; NVLink between all GPUs through switches, 18 links each; NUMA node 0: GPU 0-3, mlx5_0, mlx5_1; "
        "NUMA node 1: GPU 4-7, mlx5_2, mlx5_3"
    )
    (check,) = judge_layout(layout, "")
    assert (check.grade, check.advice) == (
        Grade.OK,
        "--numa-binding node keeps each rank on the CPUs near its GPU",
    )
    assert judge_layout(layout, "node")[0].advice == ""


def test_bridges_between_pairs() -> None:
    layout = Layout(gpus(4, (0, 2), (1, 3)), (0,) * 4, numa_nodes=1)
    assert in_words(layout) == "4 × H100; NVLink between GPUs 0-2, 1-3"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), ""),
        (Layout(gpus(1), (0,)), "1 × H100"),
        (Layout(gpus(2), (0, 0)), "2 × H100; no NVLink"),
        (Layout(gpus(2, (0, 1)), (0, 0)), "2 × H100; NVLink between all GPUs, 2 links each"),
        (Layout(gpus(2), (-1, -1), (Device("eth0", -1),), numa_nodes=2), "2 × H100; no NVLink"),
    ],
)
def test_other_machines(layout: Layout, words: str) -> None:
    assert in_words(layout) == words


def test_numbers_in_a_row_are_shortened() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# --- the place in the network ----------------------------------------------------------------------------

SLURM = {"SLURM_TOPOLOGY_ADDR": "spine1.leaf4.node12", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}


def test_slurm_names_the_switches_above_a_node() -> None:
    assert place_of("slurm", SLURM, Layout()) == ("spine1/leaf4", "")
    assert "has not set" in place_of("slurm", {}, Layout())[1]
    flat = {"SLURM_TOPOLOGY_ADDR": "node12", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert "does not know the topology" in place_of("slurm", flat, Layout())[1]


def test_the_nvlink_domain_of_a_node() -> None:
    def of(*fabrics: Fabric | None) -> tuple[str, str]:
        found = tuple(
            replace(gpu, fabric=each) for gpu, each in zip(gpus(len(fabrics)), fabrics, strict=True)
        )
        return place_of("nvlink", {}, Layout(found, (0,) * len(found)))

    ready = Fabric(3, 0, "ab12", 4)
    assert of(ready, ready) == ("ab12/4", "")
    for others in (
        (None, None),
        (Fabric(2, 0, "ab12", 4),) * 2,
        (ready, Fabric(3, 0, "ab12", 5)),
        (Fabric(3),),
    ):
        assert of(*others)[0] == ""


def test_a_place_that_is_not_known_is_a_warning() -> None:
    assert judge_place("", "", "") == ()
    assert judge_place("pod1/rack7", "pod1/rack7", "")[0].grade is Grade.OK
    (check,) = judge_place("slurm", "", "Slurm has not set SLURM_TOPOLOGY_ADDR")
    assert check.grade is Grade.WARN
    assert check.found == "--topology slurm: Slurm has not set SLURM_TOPOLOGY_ADDR"


def test_the_option() -> None:
    assert place(" /pod1/rack7/ ") == "pod1/rack7"
    assert place("slurm") == "slurm"
    for wrong in ("", "a b", "a//b", "ä", "a/" * 9 + "a", "x" * 25):
        with pytest.raises(BadValue):
            place(wrong)
