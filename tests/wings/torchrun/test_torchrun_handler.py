"""Stock torchrun, two agents on this host, through our service: it trains, restarts, and outlives a lost node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ports import free_port
from side_by_side import clean_env

if TYPE_CHECKING:
    from collections.abc import Iterator

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_a_failed_rank_restarts_both_nodes_at_a_fresh_store",
        "wings/torchrun/test_torchrun_node_state.py",
    )
)

_BIN = Path(sys.executable).parent
_TIMEOUT_S = 200

SCRIPT = """
import json, os, pathlib, signal, sys
import torch, torch.distributed as dist

here, ill = pathlib.Path(__file__).parent, sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
fails = ill == ["always"] or (ill == ["once"] and not (here / "failed").exists())
dist.init_process_group("gloo")
total = torch.tensor([float(rank)])
dist.all_reduce(total)
fact = {"rank": rank, "world": world, "total": total.item(), "node": os.environ["GROUP_RANK"],
        "store": os.environ["MASTER_PORT"], "agent": os.getppid(), "pid": os.getpid()}
with open(here / f"ran.{os.getpid()}", "w") as file:
    json.dump(fact, file)
os.rename(here / f"ran.{os.getpid()}", here / f"ran.{os.getpid()}.json")
if fails and rank == 0:
    signal.pause()  # it learns of nothing by itself
if fails:
    (here / "failed").touch()
    os._exit(7)
if ill == ["waits"] and not (here / "go").exists():
    with open(here / f"started.{rank}", "w") as told:
        told.write("yes")
    with open(here / f"gate.{rank}") as gate:
        gate.read()
dist.barrier()
dist.destroy_process_group()
"""


class Nodes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.agents: list[subprocess.Popen[bytes]] = []
        self._service: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        command = [str(_BIN / "ddp-rendezvous"), "serve", "--listen", self.endpoint, "--store", "memory"]
        with open(self.folder / "service.log", "wb") as log:
            self._service = subprocess.Popen(command, stdout=log, stderr=log, env=clean_env())

    def torchrun(self, *words: str, nnodes: str = "2", nproc: int = 1, restarts: int = 3) -> int:
        """The number of this agent."""
        command = [str(_BIN / "torchrun"), "--nnodes", nnodes, "--nproc-per-node", str(nproc)]
        command += ["--rdzv-backend", "ddp", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "job"]
        command += ["--max-restarts", str(restarts), str(self.folder / "train.py"), *words]
        number = len(self.agents)
        with open(self.folder / f"agent{number}.log", "wb") as log:
            self.agents.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=clean_env(), start_new_session=True)
            )
        return number

    def start_waiting(self, nnodes: str = "2") -> None:
        """Two agents whose ranks run and wait at their gates; ranks that start later do not wait."""
        for rank in (0, 1):
            os.mkfifo(self.folder / f"gate.{rank}")
            os.mkfifo(self.folder / f"started.{rank}")
        self.serve()
        self.torchrun("waits", nnodes=nnodes)
        self.torchrun("waits", nnodes=nnodes)
        for rank in (0, 1):
            (self.folder / f"started.{rank}").read_text()
        (self.folder / "go").touch()

    def await_in_service_log(self, words: str) -> None:
        give_up_at = time.monotonic() + _TIMEOUT_S
        while words not in (self.folder / "service.log").read_text():
            assert time.monotonic() < give_up_at, f"not in the service's log: {words}"
            time.sleep(0.05)

    def end(self, number: int) -> int:
        return self.agents[number].wait(_TIMEOUT_S)

    def log(self, number: int) -> str:
        return (self.folder / f"agent{number}.log").read_text(errors="replace")

    def ok(self, *numbers: int) -> None:
        for number in numbers:
            assert self.end(number) == 0, f"{self.log(number)}\n{(self.folder / 'service.log').read_text()}"

    def rounds(self) -> list[list[dict[str, Any]]]:
        """What the ranks told, by the store they met at, each round in order of rank."""
        by_store: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for path in sorted(self.folder.glob("ran.*.json"), key=lambda p: p.stat().st_mtime_ns):
            fact = json.loads(path.read_text())
            by_store[fact["store"]].append(fact)
        return [sorted(facts, key=lambda f: f["rank"]) for facts in by_store.values()]

    def clean_up(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for path in self.folder.glob("ran.*.json"):
            pid = json.loads(path.read_text())["pid"]
            if _is_ours(pid, self.folder):
                os.kill(pid, signal.SIGKILL)
        if self._service is not None:
            self._service.terminate()
            self._service.wait(_TIMEOUT_S)


def _is_ours(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    started.clean_up()


def test_torchrun_finds_it() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="ddp")
    assert found.value == "_ddp_launch_entry:torchrun_backend"


def test_a_failed_rank_restarts_both_nodes_at_a_fresh_store(nodes: Nodes) -> None:
    nodes.serve()
    nodes.torchrun("once")
    nodes.torchrun("once")
    nodes.ok(0, 1)
    first, second = nodes.rounds()
    assert [f["total"] for f in first] == [f["total"] for f in second] == [1.0, 1.0]
    # Node ranks are kept: the same agent has the same rank, its processes are new.
    assert [f["agent"] for f in first] == [f["agent"] for f in second]
    assert {f["pid"] for f in first}.isdisjoint(f["pid"] for f in second)


@NIGHTLY
def test_without_a_restart_left_all_agents_end(nodes: Nodes) -> None:
    nodes.serve()
    nodes.torchrun("always", restarts=0)
    nodes.torchrun("always", restarts=0)
    assert [nodes.end(0), nodes.end(1)] == [1, 1]
    assert len(nodes.rounds()) == 1
    logs = nodes.log(0) + nodes.log(1)
    assert "exitcode  : 7" in logs
    assert "rank 1: exit code 7; " in logs  # on the node whose ranks were well


@NIGHTLY
def test_a_lost_node_is_replaced_and_the_job_goes_on(nodes: Nodes) -> None:
    """Under c10d the other node would wait in its barrier until the backend's timeout."""
    nodes.start_waiting()
    lost = nodes.agents[0]
    ranks = [f["pid"] for f in nodes.rounds()[0] if f["agent"] == lost.pid]
    lost.kill()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    nodes.torchrun("waits")
    nodes.ok(1, 2)
    last = nodes.rounds()[-1]
    assert {f["agent"] for f in last} == {nodes.agents[1].pid, nodes.agents[2].pid}


@NIGHTLY
def test_a_node_that_is_told_to_end_is_done_without(nodes: Nodes) -> None:
    """torch does not tell its rendezvous about signals; the others hear of it at once all the same."""
    nodes.start_waiting(nnodes="1:2")
    nodes.agents[0].terminate()
    assert nodes.end(0) != 0
    nodes.ok(1)
    assert [(f["agent"], f["world"]) for f in nodes.rounds()[-1]] == [(nodes.agents[1].pid, 1)]
    assert "ended by a signal" in nodes.log(1)


@NIGHTLY
def test_a_node_that_stood_by_to_the_end_ends_well(nodes: Nodes) -> None:
    nodes.start_waiting()
    spare = nodes.torchrun("waits")
    nodes.await_in_service_log(f":{nodes.agents[spare].pid} joined")
    for rank in (0, 1):
        (nodes.folder / f"gate.{rank}").write_text("")
    nodes.ok(0, 1, spare)
    assert len(nodes.rounds()) == 1
