"""`--numa-binding` gives the CPUs that torch's own binding gives, on machines laid out as fake sysfs trees.

torch reads fixed paths, so its module is pointed at the tree; ours reads the tree itself.
"""

from __future__ import annotations

import inspect
import os
import shutil
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import cuda

from launcher.machine.gpu_reading import pci_address
from launcher.machine.gpu_state import GpuName, visible_indexes
from launcher.ranks.affinity import BindingError, cpus_for_rank
from launcher.ranks.topology import read_topology

if TYPE_CHECKING:
    from pathlib import Path

binding: Any
try:
    from torch.numa import binding
except ImportError:
    pytestmark = pytest.mark.skip("before 2.9, torch binds no ranks to CPUs")
MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True)
class Machine:
    sockets: int = 1
    nodes_per_socket: int = 1
    cores_per_node: int = 4
    threads: int = 1
    cores_per_cache: int = 4
    gpus: tuple[int, ...] = ()  # what each GPU's numa_node file says
    allowed: frozenset[int] | None = None
    cpus_off: frozenset[int] = frozenset()

    @property
    def cores(self) -> int:
        return self.sockets * self.nodes_per_socket * self.cores_per_node

    @property
    def online(self) -> tuple[int, ...]:
        return tuple(cpu for cpu in range(self.cores * self.threads) if cpu not in self.cpus_off)

    @property
    def usable(self) -> set[int]:
        return set(self.online if self.allowed is None else self.allowed - self.cpus_off)

    def listed(self, first_core: int, count: int) -> str:
        """All online hardware threads of `count` cores, as the kernel lists them; cores in the second run."""
        cores = range(first_core, first_core + count)
        cpus = (thread * self.cores + core for thread in range(self.threads) for core in cores)
        return ",".join(str(cpu) for cpu in cpus if cpu in self.online)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def lay_out(machine: Machine, root: Path) -> None:
    nodes = machine.sockets * machine.nodes_per_socket
    write(root / "devices/system/node/possible", f"0-{nodes - 1}" if nodes > 1 else "0")
    for node in range(nodes):
        cpus = machine.listed(node * machine.cores_per_node, machine.cores_per_node)
        write(root / f"devices/system/node/node{node}/cpulist", cpus)
    for bus, node in enumerate(machine.gpus):
        write(root / f"bus/pci/devices/{pci_address(0, bus, 0)}/numa_node", node)
    for cpu in machine.online:
        lay_out_cpu(machine, cpu, root / f"devices/system/cpu/cpu{cpu}")


def lay_out_cpu(machine: Machine, cpu: int, folder: Path) -> None:
    core = cpu % machine.cores
    node, core_of_node = divmod(core, machine.cores_per_node)
    write(folder / "topology/thread_siblings_list", machine.listed(core, 1))
    write(folder / "topology/physical_package_id", node // machine.nodes_per_socket)
    first = core_of_node - core_of_node % machine.cores_per_cache
    size = min(machine.cores_per_cache, machine.cores_per_node - first)
    last_level = machine.listed(node * machine.cores_per_node + first, size)
    caches = (("Data", 1, machine.listed(core, 1)), ("Instruction", 4, cpu), ("Unified", 3, last_level))
    for index, (kind, level, sharers) in enumerate(caches):
        write(folder / f"cache/index{index}/type", kind)
        write(folder / f"cache/index{index}/level", level)
        write(folder / f"cache/index{index}/shared_cpu_list", sharers)


def point_torch_at(machine: Machine, root: Path, patch: pytest.MonkeyPatch) -> None:
    def moved(path: str) -> str:
        return path.replace("/sys", str(root), 1)

    system = SimpleNamespace(
        listdir=lambda path: os.listdir(moved(path)),
        path=os.path,
        sched_getaffinity=lambda _: machine.usable,
    )
    gpus = SimpleNamespace(
        device_count=lambda: len(machine.gpus),
        get_device_properties=lambda index: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=range(len(machine.gpus))[index], pci_device_id=0
        ),
    )
    gpus.is_available, gpus.current_accelerator = (lambda: True), (lambda: "cuda")
    torch = SimpleNamespace(cuda=gpus, accelerator=gpus, get_device_module=lambda _kind: gpus)
    patch.setattr(binding, "open", lambda path: open(moved(path)), raising=False)
    patch.setattr(binding, "os", system)
    patch.setattr(binding, "torch", torch)
    patch.setattr(binding, "shutil", SimpleNamespace(which=lambda name: name), raising=False)


def torch_answer(mode: str, rank: int) -> tuple[int, ...] | str:
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    # In 2.9 the check is separate; before 2.14 the device is a gpu_index.
    ask = getattr(binding, "_get_validated_logical_cpus_to_bind_to", binding._get_logical_cpus_to_bind_to)
    index, *_ = inspect.signature(ask).parameters
    try:
        cpus = ask(**{index: rank, "numa_options": options})
        if not cpus:
            return "impossible"
    except (RuntimeError, ValueError, ZeroDivisionError, IndexError):
        return "impossible"
    return tuple(sorted(cpus))


def answers(machine: Machine, root: Path, ranks: int) -> list[tuple[str, int, object, object]]:
    lay_out(machine, root)
    addresses = [pci_address(0, bus, 0) for bus in range(len(machine.gpus))]
    topology = read_topology(str(root), addresses, machine.usable)
    found: list[tuple[str, int, object, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        point_torch_at(machine, root, patch)
        for mode in MODES:
            for rank in range(ranks):
                ours: object
                try:
                    ours = cpus_for_rank(topology, mode, rank, ranks)
                except BindingError:
                    ours = "impossible"
                found.append((mode, rank, ours, torch_answer(mode, rank)))
    return found


MACHINES = {
    "two sockets of two nodes": Machine(2, 2, 6, gpus=(0, 1, 2, 3, 3, 0)),
    "hardware threads": Machine(2, 1, 5, threads=2, gpus=(1, 0, 1)),
    "core complexes": Machine(1, 2, 12, threads=2, cores_per_cache=4, gpus=(0, 0, 1, 1, 1, 1)),
    "fewer cores than GPUs": Machine(1, 2, 2, gpus=(0, 0, 0, 1)),
    "more ranks than GPUs": Machine(1, 1, 4, gpus=(0,)),
    "restricted": Machine(
        2, 1, 8, threads=2, gpus=(0, 1, 0), allowed=frozenset({1, 2, 5, 6, 7, 9, 12, 18, 29})
    ),
    "a home closed to us": Machine(1, 2, 4, gpus=(0, 1), allowed=frozenset({4, 5})),
    "one node that says -1": Machine(1, 1, 8, threads=2, gpus=(-1, -1)),
    "two nodes that say -1": Machine(2, 1, 4, gpus=(-1, 1, -1)),
    "offline CPUs": Machine(1, 2, 4, threads=2, gpus=(0, 0, 1), cpus_off=frozenset({0, 3, 9, 15})),
    "one CPU": Machine(1, 1, 1, gpus=(-1,)),
}


def agree(mode: str, rank: int, ours: object, theirs: object, machine: Machine) -> bool:
    """torch's socket mode fails when any node at all is closed to us; ours only when the GPU's own is."""
    per_node = [machine.listed(n * machine.cores_per_node, machine.cores_per_node) for n in range(64)]
    nodes = [binding._get_set_of_int_from_ranges_str(text) for text in per_node]
    some_closed = any(
        not node & machine.usable for node in nodes[: machine.sockets * machine.nodes_per_socket]
    )
    return ours == theirs or (mode == "socket" and some_closed and theirs == "impossible")


@pytest.mark.parametrize("name", MACHINES)
def test_same_cpus_as_torch(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    for found in answers(machine, tmp_path, max(2, len(machine.gpus))):
        assert agree(*found, machine), found


def test_the_comparison_sees_both_successes_and_refusals(tmp_path: Path) -> None:
    machine = MACHINES["fewer cores than GPUs"]
    theirs = [found[3] for found in answers(machine, tmp_path, len(machine.gpus))]
    assert (0, 1) in theirs
    assert "impossible" in theirs


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    small = st.integers(1, 3)
    shape = Machine(draw(small), draw(small), draw(st.integers(1, 6)), draw(st.integers(1, 2)), draw(small))
    cpus = st.sampled_from(range(shape.cores * shape.threads))
    nodes = st.integers(-1, shape.sockets * shape.nodes_per_socket - 1)
    off = draw(st.frozensets(cpus, max_size=shape.cores // 2))
    open_to_us = draw(st.none() | st.frozensets(cpus.filter(lambda cpu: cpu not in off), min_size=1))
    gpus = tuple(draw(st.lists(nodes, min_size=1, max_size=6)))
    return Machine(
        shape.sockets,
        shape.nodes_per_socket,
        shape.cores_per_node,
        shape.threads,
        shape.cores_per_cache,
        gpus,
        open_to_us,
        off,
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(machines())
def test_same_cpus_as_torch_on_any_machine(
    tmp_path_factory: pytest.TempPathFactory, machine: Machine
) -> None:
    root = tmp_path_factory.mktemp("sys")
    try:
        for found in answers(machine, root, len(machine.gpus)):
            assert agree(*found, machine), found
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize(
    "visible", ["", "2,0", "1,9,0", "-1", "0,-1,2", "1,1", "GPU-2d,GPU-1a3", "GPU-1a", "GPU-2d,0", "0,GPU-2d"]
)
def test_visible_devices_as_torch_reads_them(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GpuName("a", ("GPU-1a2b",)), GpuName("b", ("GPU-1a3c",)), GpuName("c", ("GPU-2d",))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    theirs: list[Any] = list(cuda._parse_visible_devices())
    if theirs and isinstance(theirs[0], str):
        theirs = cuda._transform_uuid_to_ordinals(theirs, [gpu.uuids[0] for gpu in gpus])
    in_range = next((at for at, index in enumerate(theirs) if index >= len(gpus)), len(theirs))
    assert visible_indexes(visible, gpus) == tuple(theirs[:in_range])
