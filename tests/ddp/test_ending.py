"""A rank that has done its work ends as it said, though threads of Gloo want the GIL while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

PROGRAM = Path(__file__).with_name("late_end.py")


def test_an_end_without_an_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own: "terminate called without an active exception", exit by SIGABRT, every time."""
    pytest.importorskip("ddp.telemetry._ending", reason="the extension was not built")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # A resolver that does not answer is worth a warning to c10d.
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    port = str(free_port())
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    with subprocess.Popen([*command, "1", port]) as peer:
        try:
            done = subprocess.run(
                [*command, "0", port], capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            peer.kill()
    assert (done.returncode, done.stderr) == (3, "")


ENDS_GROUPS = """
import sys, torch, torch._dynamo, torch.distributed as dist
from ddp.telemetry import status_page, torch_marks

torch_marks._rest_before_groups_end(status_page.page())
sys.setswitchinterval(100)  # the thread of Gloo gets the GIL only if somebody gives it away
linear = torch.nn.Linear(2, 2)

def trains():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(linear)  # holds the group until this function returns
    dist.all_gather([torch.zeros(2)], torch.ones(2))
    dist.destroy_process_group()

for _ in range(100):
    trains()
"""


def test_a_group_ends_though_its_thread_releases_tensors() -> None:
    """torch's own waits for ever: its destructor joins the thread, which waits for the GIL."""
    subprocess.run([sys.executable, "-c", ENDS_GROUPS], timeout=200, check=True)
