"""Topology read from real files: trees as sysfs lays them out, this machine's own, and a compiled driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from launcher.machine.gpu_state import GpuName, visible_indexes
from launcher.ranks.affinity import BindingError, Cpu, CpuTopology, cpus_for_rank, share_cpus
from launcher.ranks.topology import (
    VisibleGpus,
    parse_cpu_list,
    read_topology,
    visible_gpus,
)

if TYPE_CHECKING:
    from pathlib import Path


def lay_out(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


def cpu_files(index: int, siblings: str, socket: int, cache: str) -> dict[str, str]:
    folder = f"devices/system/cpu/cpu{index}"
    return {
        f"{folder}/topology/thread_siblings_list": siblings,
        f"{folder}/topology/physical_package_id": str(socket),
        f"{folder}/cache/index0/level": "1",
        f"{folder}/cache/index0/type": "Data",
        f"{folder}/cache/index0/shared_cpu_list": siblings,
        f"{folder}/cache/index1/level": "3",
        f"{folder}/cache/index1/type": "Unified",
        f"{folder}/cache/index1/shared_cpu_list": cache,
        f"{folder}/cache/index2/level": "4",
        f"{folder}/cache/index2/type": "Instruction",
        f"{folder}/cache/index2/shared_cpu_list": "0-99",
    }


@pytest.fixture
def two_nodes(tmp_path: Path) -> str:
    files = {
        "devices/system/node/node0/cpulist": "0-1,4-5",
        "devices/system/node/node1/cpulist": "2-3,6-7",
        "devices/system/node/node2/cpulist": "",  # memory only
        "devices/system/node/possible": "0-2",
        "bus/pci/devices/0000:3b:00.0/numa_node": "1",
        "bus/pci/devices/0000:af:00.0/numa_node": "-1",
    }
    for index in range(8):
        core = index % 4
        cache = "0-1,4-5" if core < 2 else "2-3,6-7"
        files |= cpu_files(index, f"{core},{core + 4}", core // 2, cache)
    return lay_out(tmp_path, files)


def test_a_machine_of_two_nodes(two_nodes: str) -> None:
    gpus = ("0000:3b:00.0", "0000:af:00.0")
    assert read_topology(two_nodes, gpus, range(8)) == CpuTopology(
        tuple(
            Cpu(index, index % 4, index % 4 // 2 * 2, index % 4 // 2, index % 4 // 2) for index in range(8)
        ),
        (1, 0),
    )


def test_only_allowed_cpus_are_kept_and_their_core_keeps_its_name(two_nodes: str) -> None:
    topology = read_topology(two_nodes, allowed=[7, 5])
    assert topology.cpus == (Cpu(5, 1, 0, 0, 0), Cpu(7, 3, 2, 1, 1))


def test_a_socket_whose_other_node_is_closed_to_us_still_binds(two_nodes: str) -> None:
    topology = read_topology(two_nodes, ("0000:3b:00.0",), allowed=[2, 3])
    assert cpus_for_rank(topology, "socket", 0, 1) == (2, 3)


def test_an_offline_cpu_is_no_ones(tmp_path: Path) -> None:
    """The kernel takes an offline CPU out of every list and removes its topology folder."""
    files = {"devices/system/node/node0/cpulist": "0,2-3", "devices/system/cpu/cpu1/online": "0"}
    for index, siblings in ((0, "0,2"), (2, "0,2"), (3, "3")):
        files |= cpu_files(index, siblings, 0, "0,2-3")
    topology = read_topology(lay_out(tmp_path, files), allowed=[0, 2, 3])
    assert share_cpus(topology, 2).cpus == ((0, 2), (3,))


def test_nothing_to_read_is_one_plain_node(tmp_path: Path) -> None:
    topology = read_topology(str(tmp_path), ("0000:3b:00.0",), [1, 3])
    assert topology == CpuTopology((Cpu(1, 1, 1, 0, 0), Cpu(3, 3, 1, 0, 0)), (0,))


def test_a_gpu_of_unknown_node_is_refused_where_it_matters(two_nodes: str) -> None:
    with pytest.raises(BindingError, match=r"GPU 0000:00:01\.0 has no known NUMA node"):
        read_topology(two_nodes, ("0000:00:01.0",), range(8))


def test_this_machine_binds_a_real_process() -> None:
    topology = read_topology()
    assert [cpu.index for cpu in topology.cpus] == sorted(os.sched_getaffinity(0))
    for mode in ("node", "socket", "exclusive", "core-complex"):
        wanted = cpus_for_rank(topology, mode, 0, 1)
        child = os.fork()
        if child == 0:
            os.sched_setaffinity(0, wanted)
            os._exit(0 if os.sched_getaffinity(0) == set(wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,7\n") == (0, 1, 2, 7)
    assert parse_cpu_list("\n") == ()


GPUS = [
    GpuName("a", ("GPU-1a2b",)),
    GpuName("b", ("GPU-1a3c", "MIG-77", "MIG-78")),
    GpuName("c", ("GPU-2d",)),
]


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2, 0", (2, 0)),
        ("1,9,0", (1,)),
        ("1,none,0", (1,)),
        ("1,1", ()),
        ("GPU-2d,GPU-1a3", (2, 1)),
        ("GPU-1a,GPU-2d", ()),  # either of two
        ("GPU-2d,GPU-2", ()),
        ("GPU-2d,0", (2,)),
        ("0,GPU-2d", (0,)),
        ("MIG-78,MIG-77", (1, 1)),
        ("MIG-77,MIG-77", ()),
        ("MIG-GPU-2d/1/0,MIG-GPU-2d/2/0", (2, 2)),
    ],
)
def test_visible_devices_are_read_as_cuda_does(visible: str | None, indexes: tuple[int, ...]) -> None:
    assert visible_indexes(visible, GPUS) == indexes


# As many calls of the driver library as are used: three GPUs, the second of another model and split in two.
DRIVER = r"""
#include <stdio.h>
#include <stdint.h>
#include <string.h>
typedef struct { char old[16]; unsigned domain, bus, slot, ids, more; char text[32]; } pci;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(uintptr_t)(i + 1); return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned i, void **part) {
    if ((uintptr_t)d != 2 || i > 1) return 6;
    *part = (void *)(uintptr_t)(100 + i);
    return 0;
}
int nvmlDeviceGetUUID(void *d, char *t, unsigned n) {
    uintptr_t v = (uintptr_t)d;
    snprintf(t, n, v >= 100 ? "MIG-%lu" : "GPU-%lu", (unsigned long)v);
    return 0;
}
int nvmlDeviceGetName(void *d, char *t, unsigned n) {
    snprintf(t, n, (uintptr_t)d == 2 ? "big" : "small");
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *d, pci *p) {
    memset(p, 0, sizeof *p);
    p->domain = (uintptr_t)d == 3 ? 0x10000 : 0;
    p->bus = 0xd0 + (unsigned)(uintptr_t)d;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_driver_library_is_asked(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    seen = visible_gpus({}, library=str(library))
    assert seen.addresses == ("0000:d1:00.0", "0000:d2:00.0", "10000:d3:00.0")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in seen.warning
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for visible, addresses in {
        "2,0": ("10000:d3:00.0", "0000:d1:00.0"),
        "GPU-2": ("0000:d2:00.0",),
        "MIG-101": ("0000:d2:00.0",),
        "": (),
    }.items():
        environ = by_bus | {"CUDA_VISIBLE_DEVICES": visible}
        assert visible_gpus(environ, library=str(library)) == VisibleGpus(addresses)


@pytest.mark.parametrize(
    ("environ", "addresses"),
    [
        ({}, ("0000:c1:00.0", "0001:02:03.0")),
        ({"HIP_VISIBLE_DEVICES": "1"}, ("0001:02:03.0",)),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ("0001:02:03.0", "0000:c1:00.0")),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ("0001:02:03.0",)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ff"}, ("0000:c1:00.0",)),
    ],
)
def test_amd_gpus(tmp_path: Path, environ: dict[str, str], addresses: tuple[str, ...]) -> None:
    nodes = "class/kfd/kfd/topology/nodes"
    root = lay_out(
        tmp_path,
        {
            f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0",
            f"{nodes}/2/properties": f"simd_count 304\ndomain 0\nlocation_id {0xC100}\nunique_id 255",
            f"{nodes}/10/properties": f"simd_count 304\ndomain 1\nlocation_id {1 << 28 | 0x0218}\nunique_id 254",
        },
    )
    assert visible_gpus(environ, root, library="libno-such-driver.so") == VisibleGpus(addresses)


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    assert visible_gpus({}, str(tmp_path), library="libno-such-driver.so") == VisibleGpus()
