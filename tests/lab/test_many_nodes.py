"""A job of 32 agents with two ranks each loses two nodes, one after the other, and heals in place.

A spare takes the place of the first one. For the second one none is left, and the job goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab_host
import lab_time_line
import psutil
import pytest
from lab_bridge import BridgedLab
from lab_host import eventually
from lab_job import Job, Service
from lab_time_line import Loss

if TYPE_CHECKING:
    from lab_host import Host
    from lab_network import Lab

    Told = dict[str, Any]

NODES, RANKS_EACH = int(os.environ.get("LAB_NODES", "32")), 2
MIB_PER_NODE = 550  # measured; most of it is what torch has in memory, once in each host
# 33 hosts import torch on the processors of this machine, before the first world trains.
PATIENCE_S = 600.0
AT_REST_FOR_S = 2.0
PAGE = os.environ.get("LAB_TIME_LINE", "")  # gets the table between its markers: docs/performance.md
SHOWN = Path(__file__).parents[2] / "bench" / "shown.py"


class ManyRanks(Job):
    script = str(Path(__file__).parent / "programs" / "many.py")
    ranks_per_node = RANKS_EACH
    patience_s = PATIENCE_S

    def __init__(self, lab: Lab, folder: Path, service: Service, *words: str) -> None:
        super().__init__(lab, folder, service.endpoint, *words)
        self._service = service
        for name in ("worlds", "ends"):
            (self.folder / name).mkdir()

    def worlds(self) -> dict[int, dict[int, Told]]:
        """By generation and rank: those that have finished a step there."""
        found: dict[int, dict[int, Told]] = {}
        for path in (self.folder / "worlds").glob("[0-9]*-*"):
            generation, rank = map(int, path.name.split("-"))
            found.setdefault(generation, {})[rank] = json.loads(path.read_text())
        return found

    def await_trained(self, generation: int, size: int) -> dict[int, Told]:
        """Until all ranks of this world have finished a step."""
        names = (self.folder / "worlds").glob
        self._until(lambda: len(list(names(f"{generation}-*"))) == size, f"{size} ranks train")
        ranks = self.worlds()[generation]
        assert {rank["world_size"] for rank in ranks.values()} == {size}
        assert set(ranks) == set(range(size))
        return ranks

    def ends(self) -> dict[int, Told]:
        return {
            int(path.name): json.loads(path.read_text()) for path in (self.folder / "ends").glob("[0-9]*")
        }

    def ask(self, command: str, *words: str) -> str:
        """ddpctl, on the host of the service."""
        control = (sys.executable, "-m", "rendezvous.control.ctl", "--rendezvous", self._service.endpoint)
        return self._service.host.run(*control, "-o", "json", command, "lab", *words)

    def events(self) -> list[Told]:
        return [json.loads(line) for line in self.ask("events").splitlines()]

    def ended_well(self, *lost: Host) -> None:
        left = [agent for agent in self.agents if agent.host not in lost]
        assert self.finish(*left) == [0] * len(left), self
        ends = self.ends()
        assert set(ends) == set(range(len(left) * RANKS_EACH))
        # No step is lost or done twice, and all ranks have the same weights.
        assert {end["counter"] - end["step"] for end in ends.values()} == {0.0}
        assert len({(end["step"], end["digest"]) for end in ends.values()}) == 1
        self.assert_nothing_left()

    def lose(self, host: Host, title: str, generation: int) -> Loss:
        loss = Loss(title, time.time(), generation)
        self.lab.power_off(host)
        return loss


def processes(ranks: dict[int, Told], *, without: Host | None = None) -> set[tuple[str, int]]:
    """Each rank's process, by its host: process ids are those of the host."""
    lost = "" if without is None else without.name
    return {(rank["host"], rank["pid"]) for rank in ranks.values() if rank["host"] != lost}


def is_at_rest(host: Host) -> bool:
    """Whether its processes take no time of a processor: what they import is imported."""

    def taken_s() -> float:
        total = 0.0
        for pid in host.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                total += sum(psutil.Process(pid).cpu_times()[:2])
        return total

    before = taken_s()
    time.sleep(AT_REST_FOR_S)
    return taken_s() - before < 0.05


def memory_gib(hosts: list[Host]) -> float:
    """Of all processes of the job together: a page that several of them share counts once."""
    total = 0
    for host in hosts:
        for pid in host.processes():
            with contextlib.suppress(OSError):  # it has ended
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 2**20


@pytest.mark.nightly(
    instead=(
        "shell/test_heals.py::test_the_ranks_of_the_other_node_keep_their_processes_when_an_agent_is_killed",
        "shell/test_node_trouble.py::test_a_spare_says_so_and_takes_the_place_of_a_lost_node",
    )
)
@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_job_of_64_ranks_loses_two_nodes_and_goes_on(tmp_path: Path) -> None:
    if reason := lab_host.what_is_missing() or too_little_memory():
        pytest.skip(reason)
    with BridgedLab(NODES + 1, "service") as made:
        play(made, tmp_path)


def too_little_memory() -> str:
    wanted, there = (NODES + 1) * MIB_PER_NODE, psutil.virtual_memory().available // 2**20
    return f"{wanted} MiB of memory are needed, {there} MiB are available" if there < wanted else ""


def play(made: Lab, tmp_path: Path) -> None:
    *hosts, spare, there = made.hosts
    service = Service(there, tmp_path)
    words = ("--nnodes", str(NODES), "--spares", "1", "--recover", "in-place", "--max-restarts", "0")
    job = ManyRanks(made, tmp_path, service, *words)
    began = time.monotonic()
    job.start(*hosts)
    first = job.await_trained(1, NODES * RANKS_EACH)
    trained_after_s, memory = time.monotonic() - began, memory_gib(hosts)
    (stands_by,) = job.start(spare)
    eventually(lambda: "waits as a spare" in stands_by.stderr(), PATIENCE_S, "the spare waits")
    eventually(lambda: is_at_rest(spare), PATIENCE_S, "the spare is ready")

    lost = next(host for host in hosts if host.name == first[0]["host"])  # with rank 0 and the store
    one = job.lose(lost, "a spare takes its place", 2)
    second = job.await_trained(2, NODES * RANKS_EACH)
    assert processes(first, without=lost) < processes(second)
    assert {host for host, _ in processes(second)} == {host.name for host in (*hosts, spare)} - {lost.name}

    job.ask("resize", f"{NODES - 1}:{NODES}")
    other = next(host for host in hosts if host is not lost)
    two = job.lose(other, "no spare is left", 3)
    third = job.await_trained(3, (NODES - 1) * RANKS_EACH)
    assert processes(third) == processes(second, without=other)

    job.ended_well(lost, other)
    assert_told(job, lost, other)
    found = {loss.title: lab_time_line.seconds(loss, job.events(), job.worlds()) for loss in (one, two)}
    publish(lab_time_line.table(found), trained_after_s, memory)


def assert_told(job: ManyRanks, lost: Host, other: Host) -> None:
    """What `ddpctl` says of it, after the end."""
    kinds = ("sealed", "lost", "decision", "stopped", "ended")
    told = [(event["kind"], event["text"]) for event in job.events() if event["kind"] in kinds]
    worlds = [(1, NODES), (2, NODES), (3, NODES - 1)]
    assert [text for kind, text in told if kind == "sealed"] == [
        f"generation {number}: {nodes * RANKS_EACH} ranks on {nodes} nodes" for number, nodes in worlds
    ]
    heal = ("lost", "decision", "stopped", "sealed")
    assert [kind for kind, _ in told] == ["sealed", *heal, *heal, "decision", "ended"], told
    decisions = json.loads(job.ask("status"))["decisions"]
    decisions = [each for each in decisions if each["kind"] != "DECISION_KIND_FINISH"]
    reasons = [each["reason"] for each in decisions]
    hows = ("1 spare node", f"{NODES - 1} of {NODES} nodes")
    for reason, host, how in zip(reasons, (lost, other), hows, strict=True):
        assert reason.startswith(f"node {host.name} was lost: no heartbeat for 4 s; "), reason
        assert how in reason, reason
    assert [each["in_place"] for each in decisions] == [True, True]


def publish(table: str, trained_after_s: float, memory: float) -> None:
    spec = importlib.util.spec_from_file_location("shown", SHOWN)
    assert spec is not None
    assert spec.loader is not None
    shown = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shown)
    start = f"All {NODES * RANKS_EACH} ranks had finished a step {trained_after_s:.0f} s after the start of the job"
    job = f"{start}, which then had {memory:.1f} GiB of memory (PSS)."
    text = f"{table}\n\n{job} Machine: {shown.machine()}."
    print(text)
    if PAGE:
        shown.write_between_markers(PAGE, "many-nodes", text)


def test_a_time_line_counts_from_its_own_loss() -> None:
    """Not from an earlier one, whose events have the same kinds."""
    events = [
        {"kind": kind, "at": at + part}
        for at in (100.0, 200.0)
        for part, kind in enumerate(("lost", "decision", "stopped", "sealed", "running"))
    ]
    ranks = {0: {"began_at": 205.0, "stepped_at": 207.0}, 1: {"began_at": 206.0, "stepped_at": 206.5}}
    found = lab_time_line.seconds(Loss("late", 200.0, 3), events, {2: {}, 3: ranks})
    assert found == {"decision": 1, "stopped": 2, "sealed": 3, "running": 4, "began": 6, "stepped": 7}
    with pytest.raises(KeyError):
        lab_time_line.seconds(Loss("never decided", 300.0, 3), events, {3: ranks})
    assert "| its store is open | 4.00 |" in lab_time_line.table({"late": found})
