"""The guard beside a group of NCCL: it asks for errors, writes the flight recorder, and breaks off."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import ddp
from ddp.telemetry import guard
from launcher.health.dumps import read

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def test_a_group_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", guard.GUARD):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    ddp.init()
    try:
        dist.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()
        (backend,) = guard._asynchronous_backends(dist.group.WORLD)
        assert str(backend.get_error()).endswith("SUCCESS")
        file = tmp_path / "flight-recorder.json"
        assert guard._dump(str(file)) == ""
        (group,) = (each for each in read(str(file), 0).groups if each.description == "default_pg")
        assert group.entries[-1].op == "all_reduce"
        began = time.monotonic()
        guard.start().abort("a test")
        assert time.monotonic() - began < guard.ABORT_BUDGET_S + 1
    finally:
        guard.start().end()
        ddp.shutdown()
