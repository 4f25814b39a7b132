"""A recording by torch's profiler begins and ends at optimizer steps, and its errors never reach the training."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ddp.telemetry import profiling


class Profiler:
    """Stands for torch's: whether it can start, and what it was told."""

    refuses = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self) -> None:
        if Profiler.refuses:
            raise RuntimeError("Profiler is already enabled on this thread")
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(",".join(self.told))


class Answers:
    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def __call__(self, problem: str, steps: int) -> None:
        self.said.append((problem, steps))


@pytest.fixture(autouse=True)
def torch_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = types.ModuleType("torch.profiler")
    fake.profile = Profiler
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.profiler", fake)
    monkeypatch.setattr(Profiler, "refuses", False)
    monkeypatch.setattr(profiling._first, "_open", None)
    monkeypatch.setattr(
        profiling.threading,
        "Thread",
        lambda target, args, **_: types.SimpleNamespace(start=lambda: target(*args)),
    )


def test_steps_are_recorded_until_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, answers, path = [100.0], Answers(), tmp_path / "trace.json.gz"
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now[0])
    profiling.at_step()
    profiling.request(1.0, str(path), answers)
    for now[0] in (100.0, 100.4, 100.8, 101.2, 101.6):
        profiling.at_step()
    assert answers.said == [("", 3)]
    assert path.read_text() == "start,stop"


def test_a_script_that_profiles_itself_is_told_and_goes_on(tmp_path: Path) -> None:
    Profiler.refuses, answers = True, Answers()
    profiling.request(1.0, str(tmp_path / "t"), answers)
    profiling.at_step()
    profiling.at_step()
    assert answers.said == [("RuntimeError: Profiler is already enabled on this thread", 0)]


def test_a_second_request_is_refused_and_a_withdrawn_one_forgotten(tmp_path: Path) -> None:
    first, second = Answers(), Answers()
    profiling.request(1.0, str(tmp_path / "t"), first)
    profiling.request(1.0, str(tmp_path / "u"), second)
    assert second.said == [("this rank is already being profiled", 0)]
    profiling.withdraw()
    profiling.at_step()
    assert first.said == []


def test_a_trace_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    answers = Answers()
    profiling.request(0.0, str(tmp_path / "missing" / "t"), answers)
    profiling.at_step()
    profiling.at_step()
    ((problem, steps),) = answers.said
    assert problem.startswith("FileNotFoundError")
    assert steps == 1
