"""The pre-flight of a machine with GPUs: all of them are seen, and put to work."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def test_every_gpu_is_seen_and_at_work() -> None:
    command = (sys.executable, "-m", "launcher", "doctor", "--json")
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    grades = {check["name"]: check["grade"] for check in report["checks"]}
    assert grades["GPUs"] == "ok", report
    for at in range(torch.cuda.device_count()):
        assert grades[f"load test of GPU {at}"] == "ok", report
    assert report["versions"]["cuda"]
    assert report["versions"]["driver"]
