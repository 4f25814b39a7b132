"""A control plane on this machine: three replicas of the service over three members of etcd. Each can be killed.

The folder tests/shell must be on the path: the cluster of etcd is that of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from etcd_cluster import running
from meet.service import SERVE, Service, await_port, process
from ports import free_ports

from rendezvous.client.credential_files import ClientOptions
from rendezvous.control.service import Service as Operations
from rendezvous.pb import rendezvous_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etcd_cluster import EtcdCluster

REPLICAS = 3
_ASKED_FOR_S = 5.0
_OWNED_WITHIN_S = 60.0


class Replica(Service):
    """One replica. Its port stays the same."""

    def __init__(self, endpoint: str, url: str, folder: str) -> None:
        super().__init__(endpoint, 0)
        self._url, self._log = url, os.path.join(folder, f"replica-{endpoint.rpartition(':')[2]}.log")
        self._runs = contextlib.ExitStack()

    def start(self) -> None:
        command = [*SERVE, "--listen", self.endpoint, "--store", self._url]
        self.pid = self._runs.enter_context(process(command, self._log))
        await_port(self.endpoint, self.pid, self._log)

    def kill(self) -> None:
        os.kill(self.pid, 9)
        self.stop()

    def stop(self) -> None:
        self._runs.close()
        self.pid = 0


class Plane:
    def __init__(self, cluster: EtcdCluster, folder: str) -> None:
        self.etcd = cluster
        endpoints = [f"127.0.0.1:{port}" for port in free_ports(REPLICAS)]
        self.replicas = [Replica(endpoint, cluster.url("bench"), folder) for endpoint in endpoints]

    @property
    def endpoints(self) -> str:
        return ",".join(replica.endpoint for replica in self.replicas)

    def cpu_seconds(self) -> dict[int, float]:
        """Of each replica that runs, by its process."""
        return {replica.pid: replica.cpu_seconds() for replica in self.replicas if replica.pid}

    def cpu_since(self, before: dict[int, float]) -> float:
        """Of all replicas that have run since then."""
        return sum(now - before[pid] for pid, now in self.cpu_seconds().items() if pid in before)

    def resident_mib(self) -> float:
        """Of the largest replica: the owner of the job."""
        return max(replica.resident_mib() for replica in self.replicas if replica.pid)

    # --- who leads, and its death --------------------------------------------------------------------

    def owner(self, job: str) -> Replica:
        give_up_at = time.monotonic() + _OWNED_WITHIN_S
        while time.monotonic() < give_up_at:
            for replica in self.replicas:
                if replica.pid and job in _jobs_of(replica.endpoint):
                    return replica
            time.sleep(0.05)
        raise SystemExit(f"no replica owns {job} within {_OWNED_WITHIN_S:g} s")

    def kill_owner(self, job: str) -> Callable[[], None]:
        """Kill the replica that owns the job. Returns what starts it again."""
        owner = self.owner(job)
        owner.kill()
        return owner.start

    def kill_etcd_leader(self) -> Callable[[], None]:
        self.etcd.leader().kill()
        return self.etcd.heal


def _jobs_of(endpoint: str) -> list[str]:
    async def ask() -> list[str]:
        client = Operations([endpoint], ClientOptions(), _ASKED_FOR_S)
        answer = await client.ask(endpoint, "ListJobs", pb.ListJobsRequest())
        return [job.job_id for job in answer.jobs]

    with contextlib.suppress(grpc.aio.AioRpcError):
        return asyncio.run(ask())
    return []


@contextlib.contextmanager
def plane(folder: str) -> Iterator[Plane]:
    with contextlib.ExitStack() as stack:
        made = Plane(stack.enter_context(running(Path(folder))), folder)
        for replica in made.replicas:
            stack.callback(replica.stop)
            replica.start()
        yield made
