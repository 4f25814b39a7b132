"""Where this node is in the network (`--topology`), and what its layout means for ranks. Without I/O.

Slurm names the switches or blocks above a node in SLURM_TOPOLOGY_ADDR, "spine1.leaf4.node12", and what each part is in
SLURM_TOPOLOGY_ADDR_PATTERN, "switch.switch.node". The last part is the node itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.machine.layout import in_words, order_by_links
from launcher.preflight.checkup import Check, Grade

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.machine.layout import Layout

SLURM, NVLINK = "slurm", "nvlink"
_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
_NAME = "place in the network"


def place_of(asked: str, environ: Mapping[str, str], layout: Layout) -> tuple[str, str]:
    """The path of --topology, and why there is none. Both are empty if the option was not given."""
    if asked == SLURM:
        return _of_slurm(environ)
    if asked == NVLINK:
        return layout.block, "" if layout.block else "the GPUs of this node are in no NVLink domain"
    return asked, ""


def _of_slurm(environ: Mapping[str, str]) -> tuple[str, str]:
    parts = environ.get(_ADDRESS, "").split(".")
    kinds = environ.get(_PATTERN, "").split(".")
    if parts == [""]:
        return "", f"Slurm has not set {_ADDRESS}"
    if len(parts) < 2 or len(kinds) < 2:
        return "", "Slurm does not know the topology of this cluster (TopologyPlugin)"
    return "/".join(part.replace("/", "-") for part in parts[:-1]), ""


def judge_place(asked: str, block: str, problem: str) -> tuple[Check, ...]:
    if not asked:
        return ()
    if problem:
        advice = "give the place itself, for example --topology pod1/rack7, or leave --topology out"
        return (Check(_NAME, Grade.WARN, f"--topology {asked}: {problem}", "known", advice),)
    return (Check(_NAME, Grade.OK, block),)


def judge_layout(layout: Layout, numa_binding: str, environ: Mapping[str, str]) -> tuple[Check, ...]:
    if not layout.gpus:
        return ()
    advice = ""
    if len(set(layout.nodes)) > 1 and not numa_binding:
        advice = "--numa-binding node keeps each rank on the CPUs near its GPU"
    if "CUDA_VISIBLE_DEVICES" not in environ and (order := order_by_links(layout.gpus)):
        visible = ",".join(map(str, order))
        pairs = f"if your script groups neighbouring ranks, use --gpu-order nvlink: GPUs {visible}"
        advice = f"{advice}; {pairs}" if advice else pairs
    return (Check("GPU topology", Grade.OK, in_words(layout), advice=advice),)
