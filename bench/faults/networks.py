"""What takes a network of its own: two hosts of the lab, and the service on a third."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from fault_case import REGULARLY_S, Case, Kind
from lab_job import PORT, environment
from lab_network import Lab
from launched import eventually
from verdicts import verdict_of

if TYPE_CHECKING:
    from pathlib import Path

    from fault_play import Stage
    from lab_host import Host

_SHORT_CUT_S = 1.0  # TCP doubles its waits: it goes on 1.4 s after the cut
_PATIENCE_S = 90.0


def network(name: str, injected: str, outside: str, says: str, **more: Any) -> Case:
    given: dict[str, Any] = {
        "nodes": 2,
        "ranks": 1,
        "wrap": "plain",
        "blamed": (),
        "in_lab": True,
        "needs": "lab",
    }
    return Case(name, injected, says, outside=outside, **(given | more))


NETWORKS = (
    network(
        "link-cut",
        "the link between two nodes is cut; both reach the service",
        "cut_link",
        "all_reduce",
        blamed=None,
        certain=False,
        keeps=False,  # the agents do not know which of the two is cut off
    ),
    network(
        "power-off",
        "a node loses power",
        "power_off",
        "node1 was lost",
        kind=Kind.NODE,
        trains_s=REGULARLY_S,
    ),
    network(
        "link-cut-short",
        f"the link is cut for {_SHORT_CUT_S:g} s",
        "cut_link_for_short",
        "",
        kind=Kind.INNOCENT,
    ),
    network("link-slow", "100 ms of delay and 1 Mbit/s", "slow_link", "", kind=Kind.INNOCENT),
)


# --- where they are played ---------------------------------------------------------------------------


class LabNode:
    """A launcher on a host of the lab, seen as one on this machine is."""

    def __init__(self, host: Host, folder: Path, *words: str, env: dict[str, str]) -> None:
        self.host, self._err = host, folder / f"stderr-{host}"
        command = (sys.executable, "-m", "launcher", *words)
        with self._err.open("wb") as err:
            self.agent = host.start(*command, env=environment() | env, stdout=err, stderr=err)

    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        return {}

    def clean_up(self) -> None:
        """The lab takes everything with it."""


class Network:
    """The hosts of one case."""

    def __init__(self, folder: Path) -> None:
        self.lab = Lab(2, "service")
        self.place = f"service:{PORT}"
        log = folder / "service"
        command = (sys.executable, "-m", "rendezvous.main", "serve", "--insecure", "--listen", f"[::]:{PORT}")
        command += ("--journal-dir", str(folder / "journals"))
        with log.open("wb") as out:
            self.lab.hosts[2].start(*command, env=environment(), stdout=out, stderr=out)
        eventually(lambda: b"serving at" in log.read_bytes(), _PATIENCE_S, "the service serves")

    def start(self, folder: Path, *words: str, env: dict[str, str]) -> list[LabNode]:
        return [LabNode(host, folder, *words, env=env) for host in self.lab.hosts[:2]]


# --- what is done there ------------------------------------------------------------------------------


def cut_link(stage: Stage) -> None:
    """Until something is said of it: the next generation finds the link mended."""
    lab = _lab(stage)
    lab.shape(*lab.hosts[:2], up=False)
    try:
        eventually(lambda: verdict_of([stage.stderr()]) is not None, _PATIENCE_S, "a verdict was given")
    finally:
        lab.heal()


def cut_link_for_short(stage: Stage) -> None:
    lab = _lab(stage)
    lab.shape(*lab.hosts[:2], up=False)
    time.sleep(_SHORT_CUT_S)
    lab.heal()


def slow_link(stage: Stage) -> None:
    lab = _lab(stage)
    lab.shape(*lab.hosts[:2], delay_s=0.1, rate=1e6)


def power_off(stage: Stage) -> None:
    lab = _lab(stage)
    lab.power_off(lab.hosts[1])


def _lab(stage: Stage) -> Lab:
    assert stage.network is not None
    return stage.network.lab
