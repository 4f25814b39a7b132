"""A sweep while ranks keep their processes: nothing of theirs is touched, and nothing of an ended rank is left."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY, SOON_S, eventually

from launcher.ranks.zygote import Zygote
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.template.messages import Exited, Spawn, Started, SweepDone
from launcher.template.tree import process_stat
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launcher.template.messages import Report

NAMES = (
    "child",
    "deaf",
    "session",
    "daemon",
)  # each name has one process; "forking" another one every millisecond
RANK = FAMILY + "family()\nthere('rank')\nsignal.pause()\n"


class Node:
    """A zygote with two ranks, each of which has started the whole family."""

    def __init__(self, folder: Path, has_log_folders: bool) -> None:
        self.folder, self._has_log_folders = folder, has_log_folders
        spec = LaunchSpec(EntryPoint(EntryKind.PROGRAM, "true"), JobSpec("kept"))
        self.zygote = Zygote.start(
            spec, dict(os.environ), cgroup="", scratch=str(folder / "scratch"), warm=False
        )
        self.pids: dict[int, int] = {}
        self.outputs: list[int] = []

    def start(self, *local_ranks: int) -> None:
        for local_rank in local_ranks:
            for name in (*NAMES, "rank"):
                self.path(name, local_rank).unlink(missing_ok=True)
            env = {
                "RANK": str(local_rank),
                "THERE": str(self.folder),
            }
            if self._has_log_folders:  # otherwise only the streams show whose a process is
                env["DDP_RANK_DIR"] = f"{self.folder}/{local_rank}"
            argv = (sys.executable, "-c", RANK)
            order = Spawn(local_rank, 1, argv, None, env, (), False, False, is_python=False)
            read, write = os.pipe()
            self.outputs.append(read)
            self.zygote.spawn(order, (write, os.dup(write)))
            self.pids[local_rank] = self.report(Started).pid
        eventually(lambda: all(self.path(name, r).exists() for r in local_ranks for name in (*NAMES, "rank")))

    def report(self, kind: type[Report]) -> Report:
        """Return the next report of this kind."""
        give_up_at = time.monotonic() + SOON_S
        while True:
            self.zygote.flush()
            readable, _, _ = select.select([self.zygote], [], [], max(0.0, give_up_at - time.monotonic()))
            assert readable, f"no {kind}"
            for report in self.zygote.read() or ():
                if isinstance(report, kind):
                    return report

    def path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}-{rank}"

    def of(self, rank: int) -> list[int]:
        return [int(self.path(name, rank).read_text()) for name in NAMES]

    def living(self, rank: int) -> list[int]:
        return [pid for pid in self.of(rank) if process_stat(pid) is not None]

    def ends(self, rank: int) -> bool:
        """All of a rank that has ended. Detached processes may end a little later: a heal does not wait for them."""
        give_up_at = time.monotonic() + SOON_S
        while self.living(rank) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return not self.living(rank)

    def end(self) -> None:
        self.zygote.close()
        os.waitpid(self.zygote.pid, 0)
        for output in self.outputs:
            os.close(output)


@pytest.fixture(params=[True, False], ids=["log folders", "streams"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(tmp_path, request.param)
    yield made
    made.end()


def test_a_sweep_ends_what_an_ended_rank_has_left_and_nothing_of_a_kept_one(node: Node) -> None:
    node.start(0, 1)
    os.kill(node.pids[0], signal.SIGKILL)
    assert node.report(Exited).local_rank == 0
    node.zygote.sweep(1, 0.0, kept=(1,))
    assert node.report(SweepDone).generation == 1
    assert node.ends(0)
    assert node.living(1) == node.of(1)

    node.start(0)  # its replacement: the next sweep knows which processes are whose
    os.kill(node.pids[1], signal.SIGKILL)
    assert node.report(Exited).local_rank == 1
    node.zygote.sweep(2, 0.0, kept=(0,))
    assert node.report(SweepDone).generation == 2
    assert node.ends(1)
    assert node.living(0) == node.of(0)

    os.kill(node.pids[0], signal.SIGKILL)
    node.report(Exited)
    node.zygote.sweep(3, 0.0)
    node.report(SweepDone)
    assert node.living(0) == []


def test_a_rank_that_has_ended_is_not_kept(node: Node) -> None:
    """Its end and the order to keep it may cross."""
    node.start(0, 1)
    os.kill(node.pids[0], signal.SIGKILL)
    node.report(Exited)
    node.zygote.sweep(1, 0.0, kept=(0, 1))
    assert node.report(SweepDone)
    assert node.ends(0)
    assert node.living(1) == node.of(1)


def test_kept_ranks_do_not_wait_for_the_time_that_detached_processes_have(node: Node) -> None:
    node.start(0, 1)
    os.kill(node.pids[0], signal.SIGKILL)
    node.report(Exited)
    session = int(node.path("session", 0).read_text())
    node.zygote.sweep(1, 3.0, kept=(1,))
    node.report(SweepDone)
    assert session in node.living(0)  # it has its time still
    node.start(2)  # the ranks of the next generation run when that time is over
    eventually(lambda: node.living(0) == [], what="the detached processes have ended")
    assert (node.living(1), node.living(2)) == (node.of(1), node.of(2))
