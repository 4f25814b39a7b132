"""What is done to a job from outside: signals to its ranks, to their children, to its agents."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import needs
import networks
from fault_case import HANG_TIMEOUT_S
from launched import eventually

if TYPE_CHECKING:
    from fault_play import Stage
    from launched import Launched


def commit(stage: Stage) -> None:
    """From here on the time counts."""
    (stage.shared / "injected-outside").write_text(str(time.monotonic()))
    getattr(networks if stage.case.in_lab else sys.modules[__name__], stage.case.outside)(stage)


def tidy(stage: Stage) -> None:
    """The groups that processes of the job were put into."""
    with contextlib.suppress(FileNotFoundError):
        folder = (stage.shared / "cgroup").read_text()
        eventually(lambda: _removed(folder), what=f"{folder} can be removed")


def _removed(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


def kill_rank(stage: Stage) -> None:
    os.kill(stage.pid_of(1), signal.SIGKILL)


def kill_rank_0(stage: Stage) -> None:
    os.kill(stage.pid_of(0), signal.SIGKILL)


def terminate_rank(stage: Stage) -> None:
    os.kill(stage.pid_of(1), signal.SIGTERM)


def kill_loader(stage: Stage) -> None:
    os.kill(_loader_of(stage, 1), signal.SIGKILL)


def _loader_of(stage: Stage, rank: int) -> int:
    pid = stage.pid_of(rank)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


# --- stopped -----------------------------------------------------------------------------------------


def stop_rank(stage: Stage) -> None:
    os.kill(stage.pid_of(1), signal.SIGSTOP)


def stop_rank_0(stage: Stage) -> None:
    os.kill(stage.pid_of(0), signal.SIGSTOP)


def stop_last_rank(stage: Stage) -> None:
    os.kill(stage.pid_of(stage.case.nodes * stage.case.ranks - 1), signal.SIGSTOP)


def stop_two_ranks(stage: Stage) -> None:
    for rank in (1, 2):
        os.kill(stage.pid_of(rank), signal.SIGSTOP)


def stop_loader(stage: Stage) -> None:
    os.kill(_loader_of(stage, 1), signal.SIGSTOP)


def stop_all_for_a_while(stage: Stage) -> None:
    pids = [stage.pid_of(rank) for rank in range(stage.case.ranks)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * HANG_TIMEOUT_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def freeze_rank(stage: Stage) -> None:
    """In a group of its own below that of the job, which the launcher may kill all the same."""
    pid = stage.pid_of(1)
    own = next(
        line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::")
    )
    folder = needs.cgroup_2() / own[3:].strip("/") / "frozen"
    folder.mkdir()
    (folder / "cgroup.procs").write_text(str(pid))
    (folder / "cgroup.freeze").write_text("1")
    (stage.shared / "cgroup").write_text(str(folder))


_SEIZE, _INTERRUPT = 0x4206, 0x4207  # of ptrace; the rank goes on when its tracer ends
_TRACES = """
import ctypes, sys, time
for request in map(int, sys.argv[2:]):
    assert ctypes.CDLL(None).ptrace(request, int(sys.argv[1]), None, None) == 0
time.sleep(600)
"""


def trace_rank_for_a_while(stage: Stage) -> None:
    pid = stage.pid_of(1)
    tracer = subprocess.Popen([sys.executable, "-c", _TRACES, *map(str, (pid, _SEIZE, _INTERRUPT))])
    stage.others.append(tracer)
    eventually(lambda: "(tracing stop)" in Path(f"/proc/{pid}/status").read_text(), what="it is held")
    time.sleep(2 * HANG_TIMEOUT_S)
    tracer.kill()


# --- agents and services -----------------------------------------------------------------------------


def _agent_of_last_rank(stage: Stage) -> Launched:
    pid = stage.pid_of(stage.case.nodes * stage.case.ranks - 1)
    return next(node for node in stage.nodes if pid in node.processes())


def kill_agent(stage: Stage) -> None:
    _agent_of_last_rank(stage).agent.kill()


def stop_agent(stage: Stage) -> None:
    """Without the second signal its ranks would train on with the others, and nothing would be lost."""
    _agent_of_last_rank(stage).send(signal.SIGSTOP)
    for rank in range(stage.case.ranks, stage.case.nodes * stage.case.ranks):
        os.kill(stage.pid_of(rank), signal.SIGKILL)


def stop_node(stage: Stage) -> None:
    for pid in _agent_of_last_rank(stage).processes():
        os.kill(pid, signal.SIGSTOP)


def kill_node(stage: Stage) -> None:
    """As a machine that loses its power, but its connections are closed at once."""
    for pid in _agent_of_last_rank(stage).processes():
        os.kill(pid, signal.SIGKILL)


def kill_zygote(stage: Stage) -> None:
    os.kill(_agent_of_last_rank(stage).zygote(), signal.SIGKILL)


def restart_service(stage: Stage) -> None:
    assert stage.service is not None
    stage.service.end(signal.SIGKILL)
    stage.start_service()


def stop_rank_without_service(stage: Stage) -> None:
    assert stage.service is not None
    stage.service.end(signal.SIGKILL)
    os.kill(stage.pid_of(3), signal.SIGSTOP)
    time.sleep(2 * HANG_TIMEOUT_S)
    stage.start_service()
