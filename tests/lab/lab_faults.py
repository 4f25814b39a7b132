"""Random faults: which, and on whom, follows from a seed alone, so that a run that failed can be repeated."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from lab_host import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab_host import Host
    from lab_job import Agent, Job, Service


class Kind(StrEnum):
    RANK_RAISES = "rank raises"
    RANK_KILLED = "rank killed"
    AGENT_KILLED = "agent killed"
    POWER_OFF = "power off"
    LINK_CUT = "link cut"
    LINK_LOSSY = "link lossy"
    PARTITION = "partition"
    SERVICE_KILLED = "service killed"
    SERVICE_AND_NODE = "service and node"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    node: int
    for_s: float  # of those that last


def plan(seed: int, n: int, nodes: int) -> Iterator[Fault]:
    """Every kind comes before one comes again."""
    chance = random.Random(seed)
    kinds: list[Kind] = []
    for _ in range(n):
        kinds = kinds or chance.sample(list(Kind), len(Kind))
        yield Fault(kinds.pop(), chance.randrange(nodes), chance.choice((0.2, 1.0, 6.0)))


class Saboteur:
    """Carries faults out on a job of fixed size, and mends what it broke: what healing needs is there again."""

    def __init__(self, job: Job, service: Service) -> None:
        self._job, self._service, self._lab = job, service, job.lab
        self.agents: dict[str, Agent] = {agent.host.name: agent for agent in job.agents}

    def commit(self, fault: Fault) -> None:
        host = self._lab.hosts[fault.node]
        match fault.kind:
            case Kind.RANK_RAISES:
                self._job.order(fault.node, "raise the batch is bad")
            case Kind.RANK_KILLED:
                self._job.kill(self._job.ranks()[fault.node])
            case Kind.AGENT_KILLED:
                agent = self.agents[host.name]
                agent.process.send(signal.SIGKILL)
                agent.process.wait()
                self._start_again(host)
            case Kind.POWER_OFF:
                self._lab.power_off(host)
                time.sleep(fault.for_s)
                self._lab.power_on(host)
                self._start_again(host)
            case Kind.LINK_CUT | Kind.PARTITION | Kind.LINK_LOSSY:
                self._spoil(fault, host)
                time.sleep(fault.for_s)
                self._lab.heal()
            case Kind.SERVICE_KILLED:
                self._service.kill()
                time.sleep(fault.for_s)
                self._service.start()
            case Kind.SERVICE_AND_NODE:
                self._lab.power_off(self._service.host)
                self._lab.power_off(host)
                time.sleep(fault.for_s)
                for each in (self._service.host, host):
                    self._lab.power_on(each)
                self._service.start()
                self._start_again(host)
            case _:
                assert_never(fault.kind)

    def _spoil(self, fault: Fault, host: Host) -> None:
        match fault.kind:
            case Kind.LINK_CUT:
                self._lab.cut(host)
            case Kind.PARTITION:
                self._lab.partition([host, self._service.host], [h for h in self._nodes() if h is not host])
            case _:
                for other in self._lab.hosts:
                    if other is not host:
                        self._lab.shape(host, other, loss=0.3, delay_s=0.01)

    def _start_again(self, host: Host) -> None:
        eventually(lambda: not host.processes(), what=f"nothing runs on {host} any more")
        (self.agents[host.name],) = self._job.start(host)

    def _nodes(self) -> list[Host]:
        return [host for host in self._lab.hosts if host is not self._service.host]
