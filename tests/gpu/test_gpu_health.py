"""What NVML tells of real GPUs."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from launcher.health.node_watch import open_gpus
from launcher.machine.gpu_reading import driver, read_all, read_layout
from launcher.machine.gpu_state import in_words
from launcher.machine.xids import short_bus

pytestmark = pytest.mark.gpu


def test_every_gpu_answers_and_is_well() -> None:
    gpus = open_gpus()
    if gpus is None:
        pytest.skip("there is no NVIDIA driver here")
    for gpu in gpus.read():
        assert not gpu.lost
        assert gpu.memory_total > gpu.memory_used >= 0
        assert gpu.utilization is None or 0 <= gpu.utilization <= 100
        assert gpu.temperature is not None
        assert 0 < gpu.temperature < 120
        assert gpu.bus
        assert gpu.name


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="compares with nvidia-smi")
def test_what_is_read_is_what_nvidia_smi_shows() -> None:
    """The layouts of NVML's structures are ours: a wrong one shows here."""
    fields = "index,name,uuid,memory.total,pcie.link.width.max,persistence_mode,pci.bus_id"
    command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    with driver() as nvml:
        assert nvml is not None
        assert nvml.count() == len(rows)
        for row in rows:
            index, name, uuid, total, width, persistence, bus = (cell.strip() for cell in row.split(","))
            gpu = read_all(nvml, int(index))
            assert (gpu.name, gpu.uuids[0], short_bus(gpu.bus)) == (name, uuid, short_bus(bus))
            assert gpu.memory_total >> 20 == int(total)
            assert gpu.pcie is None or gpu.pcie.most_width == int(width)
            assert gpu.persistence is (persistence == "Enabled")
            assert all(process.pid > 0 for process in gpu.processes)


def test_the_layout_of_this_machine_has_all_its_gpus() -> None:
    layout = read_layout()
    with driver() as nvml:
        if nvml is None:
            pytest.skip("there is no NVIDIA driver here")
        assert len(layout.gpus) == nvml.count()
    assert in_words(layout)
