"""What one agent costs in a job of many nodes, while nothing happens.

    python bench/cluster.py [--nodes 32] [--ranks 8] [--seconds 10] [--write-docs]

One real `ddp-launch` with its ranks, which do nothing; the other nodes are client sessions that say what agents say,
with ranks that do not exist; a real service. Counted is the processor time of the agent's process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time

from meet.service import serving
from shown import ROOT, machine, write_between_markers
from watched import RANK_SCRIPTS, WatchedRun

from rendezvous.client.credential_files import ClientOptions
from rendezvous.client.session import connect
from rendezvous.values.contracts import VERSION
from rendezvous.values.events import AgentJoined
from rendezvous.values.types import AgentId, JobSpec, NodeFacts, Recover, ScaleUp

SCRIPT = os.path.join(RANK_SCRIPTS, "idle.py")
JOB = "cluster"
LIMIT = 1.0  # per cent of one processor
_START_S = 120.0


class Neighbours:
    """The agents of the other nodes, on a thread of their own: they join, send heartbeats, and are told things."""

    def __init__(self, endpoint: str, spec: JobSpec) -> None:
        self._endpoint, self._spec = endpoint, spec
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._join(), self._loop).result()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _join(self) -> None:
        self._sessions = []
        for number in range(1, self._spec.max_nodes):
            agent = AgentId(f"node{number}", "1")
            session = connect([self._endpoint], agent, ClientOptions())
            session.send(
                AgentJoined(agent, self._spec, NodeFacts(agent.node, "127.0.0.1", 8, node_rank=number))
            )
            self._sessions.append(session)

    async def _leave(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))


def measure(nodes: int, ranks: int, seconds: float) -> float:
    """Per cent of one processor."""
    asked = JobSpec(
        JOB,
        nodes,
        nodes,
        SCRIPT,
        nproc=str(ranks),
        version=VERSION,
        scale_up=ScaleUp.IMMEDIATE,
        recover=Recover.AUTO,
    )
    with serving("memory") as service, Neighbours(service.endpoint, asked):
        program = os.path.join(os.path.dirname(sys.executable), "ddp-launch")
        words = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--node-rank", "0"]
        words += ["--rendezvous", service.endpoint, "--rdzv-id", JOB, SCRIPT]
        with WatchedRun([program, *words], {}, _START_S + seconds) as run:
            run.until(lambda run: len(run.of("line")) == ranks)
            time.sleep(1.0)  # what belongs to the start is over
            before, began = _cpu_seconds(run.pid), time.monotonic()
            time.sleep(seconds)
            return (_cpu_seconds(run.pid) - before) / (time.monotonic() - began) * 100


def _cpu_seconds(pid: int) -> float:
    """All threads, by the kernel's clock for the process: ticks of 10 ms are too coarse."""
    return time.clock_gettime((~pid << 3) | 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    page = os.path.join(ROOT, "docs", "performance.md")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page)
    options = parser.parse_args()
    machine_line = machine()
    share = measure(options.nodes, options.ranks, options.seconds)
    text = (
        f"| a job of {options.nodes} nodes, {options.ranks} ranks here | ddp-launch | target | |\n|---|---:|---:|---|\n"
        f"| agent, CPU over {options.seconds:g} s | {share:.2f} % | <= {LIMIT:g} % | "
        f"{'met' if share <= LIMIT else 'not met'} |\n\nMachine: {machine_line}."
    )
    print(text)
    if options.write_docs:
        write_between_markers(options.write_docs, "cluster", text)


if __name__ == "__main__":
    main()
