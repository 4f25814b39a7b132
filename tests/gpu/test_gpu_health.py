"""What NVML tells of real GPUs."""

from __future__ import annotations

import pytest

from launcher.health.gpus import open_gpus

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
