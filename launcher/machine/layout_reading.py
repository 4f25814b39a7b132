"""Reads how GPUs and network cards of this node are connected, from NVML and sysfs."""

from __future__ import annotations

from launcher.machine import nvml
from launcher.machine.gpu_reading import read_all
from launcher.machine.layout import UNKNOWN_NODE, Device, Layout
from launcher.machine.small_files import names_in, text_of


def read_layout(root: str = "/sys", library: str = nvml.LIBRARY) -> Layout:
    """A layout without GPUs if there is no driver."""
    with nvml.driver(library) as opened:
        gpus = () if opened is None else tuple(read_all(opened, index) for index in range(opened.count()))
    sound = tuple(gpu for gpu in gpus if not gpu.lost)
    if not sound:
        return Layout()
    homes = tuple(_node_of(f"{root}/bus/pci/devices/{gpu.bus}") for gpu in sound)
    cards = _devices(f"{root}/class/infiniband") or _devices(f"{root}/class/net")
    nodes = [
        name
        for name in names_in(f"{root}/devices/system/node")
        if name[:4] == "node" and name[4:].isdecimal()
    ]
    return Layout(sound, homes, cards, len(nodes))


def _devices(folder: str) -> tuple[Device, ...]:
    """Those that are hardware; a virtual interface has no file of a NUMA node."""
    found = [(name, text_of(f"{folder}/{name}/device/numa_node").strip()) for name in names_in(folder)]
    return tuple(Device(name, _number(text)) for name, text in found if text)


def _node_of(device: str) -> int:
    return _number(text_of(f"{device}/numa_node").strip())


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else UNKNOWN_NODE
