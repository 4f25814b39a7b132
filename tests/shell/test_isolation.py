"""An agent that is cut off from the service: healthy ranks go on, ranks that hang are stopped."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from ports import free_port
from served import serving

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

# In its first generation it works, or waits for ever; later ones just end.
TRAIN = """
import os, sys, time
path = os.path.join(os.environ["THERE"], f"{os.environ['DDP_GENERATION']}-{os.environ['RANK']}")
with open(path + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".part", path)
if os.environ["DDP_GENERATION"] == "1":
    while not os.path.exists(os.environ["FINISH"]):
        match sys.argv[1]:
            case "computes":
                sum(range(1_000_000))
                time.sleep(0.02)
            case "talks":
                print("step", flush=True)
                time.sleep(0.1)
            case "hangs":
                time.sleep(60)
"""


@pytest.fixture
def listen() -> str:
    return f"127.0.0.1:{free_port()}"


def test_an_agent_whose_ranks_failed_while_it_was_cut_off_says_so_and_ends_after_the_join_timeout(
    launch: Launch, tmp_path: Path, listen: str
) -> None:
    with serving("--store", f"file:{tmp_path}/jobs", listen=listen) as service:
        job = launch(
            *("--rendezvous", listen, "--rdzv-id", "job", "--max-restarts", "1", "--join-timeout", "3"),
            *("--nproc-per-node", "2", "--isolation-timeout", "1", "SCRIPT", "hangs"),
            source=TRAIN,
            env={"FINISH": str(tmp_path / "finish")},
            fake_torch="",
        )
        job.await_there("1-0", "1-1")
        os.kill(service.pid, signal.SIGSTOP)  # so the rank fails before the agent notices that it is cut off
        os.kill(int((job.there / "1-0").read_text()), signal.SIGKILL)
        service.end(signal.SIGKILL)
    assert job.wait() == 75
    said = job.stderr()
    assert said.count("cannot reach the rendezvous, and no rank runs on this node; retrying for 3 s") == 1
    assert "the rendezvous was unreachable for 3 s" in said
    job.assert_nothing_left()
