"""While a rank is debugged, groups wait for a week, whatever timeout the script passes."""

from __future__ import annotations

import sys
import types
from datetime import timedelta
from typing import Any

import pytest

from ddp.telemetry import torch_marks


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for torch.distributed."""
    found: Any = types.ModuleType("torch.distributed")
    found.calls = []

    def init_process_group(backend: str = "", timeout: timedelta | None = None, rank: int = -1) -> None:
        found.calls.append((backend, timeout, rank))

    found.init_process_group = init_process_group
    torch: Any = types.ModuleType("torch")
    torch.distributed = found
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", found)
    return found


@pytest.mark.parametrize(
    "words",
    [{}, {"timeout": timedelta(seconds=1)}],
)
def test_the_timeout_is_long_where_a_rank_is_debugged(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]
) -> None:
    monkeypatch.setenv("DDP_DEBUG", "other")
    torch_marks.install_patience()
    distributed.init_process_group("gloo", **words)
    distributed.init_process_group("gloo", timedelta(seconds=1), 3)
    assert distributed.calls == [("gloo", torch_marks.LONG, -1), ("gloo", torch_marks.LONG, 3)]
    assert distributed.init_process_group.__name__ == "init_process_group"


def test_nothing_changes_otherwise(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_DEBUG", raising=False)
    original = distributed.init_process_group
    torch_marks.install_patience()
    assert distributed.init_process_group is original
