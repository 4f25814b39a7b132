"""The backend that behaves as ProcessGroupNCCL does, on its own: one rank, or groups that a test puts together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from nccl_like import Fault, break_down, faults, register
from nccl_like.flight import RECORDER, Recorder
from nccl_like.mesh import _HEAD, Gone, Mesh
from nccl_like.stream import Operation

from ddp.telemetry import guard
from launcher.failure.verdict import RankEnd, cause_of
from launcher.health.dumps import _request_dump, compared, parsed, those_there
from launcher.health.flight_recorder import DUMP_FILE, PIPE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSIONS = ("2.3", "2.4", "2.5", "2.7", "2.9", "2.10")
_DEADLINE_S = 60.0


class Ranks:
    """A group as the recorder sees it, without its collectives."""

    group_name = "0"

    def __init__(self, entered: int, completed: int) -> None:
        self._sequence = entered
        self._communicator = self
        self.pending = [None] * (entered - completed)

    def _place(self) -> tuple[str, str]:
        return "0", "default_pg"


def recorder_of(n_entered: int, n_completed: int) -> Recorder:
    recorder, group = Recorder(), Ranks(n_entered, n_completed)
    recorder.add_group(group)
    for number in range(1, n_entered + 1):
        tensors = [torch.zeros(4)]
        operation = Operation(number, "ALLREDUCE", "nccl:all_reduce", tensors, tensors, 600.0)
        operation.started = True
        operation.done = number <= n_completed
        recorder.record(group, operation)
    return recorder


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["json", "pickle"])
def test_recorders_of_all_versions_name_the_rank_that_did_not_come(
    kind: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_LIKE_RECORDER", version)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 1, 2])
    recorders = [recorder_of(3, 2), recorder_of(2, 2), recorder_of(3, 2)]
    data = [each.as_json() if kind == "json" else each.as_pickle() for each in recorders]
    dumps = [parsed(each, rank) for rank, each in enumerate(data)]
    (found,) = compared(dumps)
    assert found.startswith("rank 1: ranks 0 and 2 have waited for it")
    assert "all_reduce #3" in found
    assert dumps[0].groups[0].members == (0, 1, 2)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCH_NCCL_COORD_CHECK_MILSEC", "20")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the process is that of the tests
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/{DUMP_FILE}")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", f"{tmp_path}/{PIPE_FILE}")
    if "nccl_like" not in dist.Backend.backend_list:
        register()
    RECORDER.clear()
    store = dist.HashStore()
    dist.init_process_group("nccl_like", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield dist.group.WORLD
    faults.sticky = faults.Fault()
    dist.destroy_process_group()


def await_true(condition: Any) -> None:
    done = threading.Event()
    for _ in range(int(_DEADLINE_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("not within a minute")


def test_the_guard_sees_the_error_of_a_communicator_and_no_call_raises_it(group: Any) -> None:
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    (backend,) = guard._asynchronous_backends(group)
    assert str(backend.get_error()).endswith("SUCCESS")
    break_down(Fault(faults.system_error("NET/IB : mlx5_0:1 Got async event : port error")))
    work = dist.all_reduce(tensor, async_op=True)
    await_true(lambda: guard._status(backend) == "COMM_ERROR")
    assert not work.is_success()
    guard._abort(group)
    assert work.wait()  # without an error
    assert tensor.isnan().all()
    with pytest.raises(dist.DistBackendError, match="NCCL communicator was aborted on rank 0"):
        dist.all_reduce(tensor)


ABORTED = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from nccl_like import Fault, break_down, faults, register
from ddp.telemetry import guard
register()
short = sys.argv[1] == "timeout"
limit = timedelta(seconds=1 if short else 60)
dist.init_process_group("nccl_like", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
(backend,) = guard._asynchronous_backends(dist.group.WORLD)
assert backend.name() == "nccl2"
break_down(Fault(hangs=True) if short else Fault(faults.system_error("NET/IB : mlx5_0:1 port error")))
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("timeout", "collective operation timeout"),
        ("error", "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ],
)
def test_a_rank_that_the_watchdog_of_nccl2_has_aborted_is_reported_with_its_reason(
    why: str, words: str
) -> None:
    environ = os.environ | {"NCCL_LIKE_2": "1", "PYTHONPATH": os.path.dirname(__file__)}
    command = (sys.executable, "-c", ABORTED, why)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT, done.stderr
    cause = cause_of(RankEnd("node-b", 0, 0, None, signal=signal.SIGABRT, stderr_tail=done.stderr))
    assert words in cause.reason


def test_a_line_in_the_pipe_makes_torchs_monitor_write_its_recorder(group: Any, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(4))
    await_true(lambda: _request_dump(str(tmp_path), 0))
    await_true(lambda: os.path.exists(tmp_path / f"{DUMP_FILE}0"))
    (dump,) = those_there({0: str(tmp_path)})
    (found,) = (each for each in dump.groups if each.name == "0")
    assert found.entries[-1].op == "all_reduce"
    assert found.entries[-1].done


def test_the_guard_writes_the_recorder_of_nccl_and_not_that_of_gloo(group: Any, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(8))
    file = tmp_path / "flight-recorder.json"
    assert guard._dump(str(file)) == ""
    plain = json.loads(file.read_text())
    assert plain["entries"][-1]["profiling_name"] == "nccl:all_reduce"
    assert plain["entries"][-1]["input_sizes"] == [[8]]


def test_a_peer_that_leaves_after_its_part_is_not_missed() -> None:
    """The last barrier of a program: a rank that has passed it ends while another still waits for a third."""
    block = _HEAD.pack(7, 2)
    mesh = object.__new__(Mesh)
    pairs = {peer: socket.socketpair() for peer in (0, 2)}
    mesh.rank, mesh.size, mesh.peers = 1, 3, {peer: ours for peer, (ours, _) in pairs.items()}
    mesh.wake_r, mesh._wake_w = os.pipe()
    mesh._early, mesh._ended = {peer: bytearray() for peer in pairs}, set()
    for ours in mesh.peers.values():
        ours.setblocking(False)
    got: list[Any] = []
    waits = threading.Thread(target=lambda: got.append(mesh.exchange(7, [b"1"] * 3)))
    pairs[2][1].sendall(block + b"22")
    waits.start()
    pairs[2][1].recv(64)
    pairs[2][1].close()
    while 2 not in mesh._ended and waits.is_alive():
        pass
    pairs[0][1].sendall(block + b"00")
    waits.join(20.0)
    assert got == [[b"00", b"1", b"22"]]
    with pytest.raises(Gone):  # it takes no part in the next one
        mesh.exchange(8, [b"1"] * 3)
    for each in (*pairs[0], *pairs[2]):
        each.close()
    for fd in (mesh.wake_r, mesh._wake_w):
        os.close(fd)
