"""A recording by torch's profiler begins and ends at optimizer steps, and its errors never reach the training."""

from __future__ import annotations

import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ddp.telemetry import profiling, torch_marks
from ddp.telemetry.comm_words import is_communication_error, is_fault_of_this_rank


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


# --- while a rank is debugged, groups wait for a week, whatever timeout the script passes -------------


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


# --- which errors are about a peer or a connection, and not about the script --------------------------


class DistError(RuntimeError):
    """As torch names it. These tests do not import torch."""


class DistBackendError(DistError): ...


QUOTED = (
    "Got the following error when running the callback: DistBackendError: rank 0 died (noticed by rank 1)"
)


@pytest.mark.parametrize(
    ("error", "is_about_communication"),
    [
        (RuntimeError(QUOTED), True),  # torch's reducer, over a group that was made in Python
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("The size of tensor a (8) must match the size of tensor b (4)"), False),
        (ValueError("connection reset by peer"), False),
        (RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 1"), False),
        (RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo"), False),
        (RuntimeError("Backend gloo does not support alltoall_base"), False),
        (RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), False),
        (
            NotImplementedError("the mpi4py backend does not support sparse tensors. Use the backend gloo"),
            False,
        ),
        (DistBackendError("MPI: MPI_ERR_COUNT: invalid count argument"), False),
        (DistBackendError("MPI: MPI_ERR_PROC_FAILED: process failure"), True),
        (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, invalid usage\nncclInvalidUsage"), False),
        (DistBackendError("NCCL error: unhandled system error\nsocket closed by remote peer"), True),
    ],
)
def test_an_error_of_communication_is_recognized(error: Exception, is_about_communication: bool) -> None:
    assert is_communication_error(error) is is_about_communication


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (
            "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\nDuplicate GPU detected : rank 1",
            True,
        ),
        ("NCCL error: unhandled system error\nLast error:\nBootstrap : no socket interface found", True),
        (
            "NCCL error: unhandled system error\nLast error:\nNET/IB : mlx5_0:1 Got async event : port error",
            True,
        ),
        (
            "NCCL error: unhandled system error\nsocketProgress: Connection closed by remote peer node-1<5>",
            False,
        ),
        ("NCCL error: remote process exited or there was a network error", False),
        ("Connection closed by peer [127.0.0.1]:1", False),
        ("the tensor has an invalid argument", False),
    ],
)
def test_faults_of_a_rank_itself_are_not_waited_out(text: str, own: bool) -> None:
    assert is_fault_of_this_rank(RuntimeError(text)) is own
