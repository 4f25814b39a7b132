"""What a running job listens on: the ranks' store on the chosen interface only, for the life of a generation only."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from launched import eventually
from ports import free_port

if TYPE_CHECKING:
    from launched import Launch, Launched

    Listener = tuple[str, int]

PROGRAM = str(Path(__file__).parent / "programs" / "two_generations.py")
CHOSEN = "127.0.0.1"


def listeners(job: Launched) -> set[Listener]:
    """Of all its processes, over TCP."""
    found: set[Listener] = set()
    for pid in job.processes():
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((each.laddr.ip.removeprefix("::ffff:"), each.laddr.port))
    return found


def store(job: Launched, generation: int) -> Listener:
    """As the ranks were told."""
    host, _, port = (job.there / f"store-{generation}").read_text().rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("how", ["one machine", "an interface"])
def test_the_store_listens_only_on_its_interface_during_its_generation(launch: Launch, how: str) -> None:
    """Two nodes, or one, whose first rank fails once. Gloo's own ports are on the same interface."""
    words, nodes = ("--max-restarts", "1", "--nproc-per-node", "2", "--preflight", "off"), 1
    rendezvous: set[Listener] = set()
    if how == "an interface":
        port, nodes = free_port(), 2
        rendezvous = {(CHOSEN, port)}
        words = (
            *words,
            "--nnodes",
            "2",
            "--interface",
            "lo",
            "--rendezvous",
            f"{CHOSEN}:{port}",
            "--rdzv-id",
            "two",
        )
    jobs = [launch(*words, PROGRAM)]
    jobs += [launch(*words, PROGRAM, env={"THERE": str(jobs[0].there)}) for _ in range(nodes - 1)]
    first = jobs[0]

    def all_listeners() -> set[Listener]:
        return set().union(*(listeners(job) for job in jobs))

    first.await_there("store-1", "trains-1")
    before = all_listeners()
    assert store(first, 1) in before
    assert {host for host, _ in before} == {CHOSEN}, before
    (first.there / "fail").touch()
    first.await_there("store-2", "trains-2")
    # Its keeper was killed before, but nobody has waited for its end.
    eventually(lambda: store(first, 1) not in all_listeners(), what="the first generation's store is closed")
    after = all_listeners()
    assert store(first, 2) in after
    assert {host for host, _ in after} == {CHOSEN}, after
    (first.there / "end").touch()
    assert [job.wait() for job in jobs] == [0] * nodes, [job.stderr() for job in jobs]
    eventually(lambda: not all_listeners(), what="nothing listens any more")
    assert rendezvous <= before
