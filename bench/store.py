"""What a write costs in each store: memory, file (SQLite), and etcd of three members on this machine.

    python bench/store.py [--seconds 2] [--rounds 3] [--nodes 32 4096] [--json FILE] [--write-docs [FILE]]

A write is one compare-and-swap of a job's state after a decision about one node. "alone": one job, one write after
another. "64 jobs": 64 of them at it at the same time. The stores take turns in every round; the figures are medians
of the rounds' own. All three etcd members share this machine's processors and disk with the writer.
"""

# ruff: noqa: E402 - the path has to be put right before the package is imported
from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shown import ROOT, machine, publish

# The package, not the bench of that name beside this one.
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests", "shell")]

from etcd_cluster import running

from rendezvous.store.open import open_store
from rendezvous.store.protocol import Packer
from rendezvous.values.job_state import DECISIONS_KEPT, Exclusion, JobState, Member, Phase
from rendezvous.values.types import (
    AgentId,
    Decision,
    DecisionKind,
    JobSpec,
    NodeFacts,
    Placement,
    World,
)

if TYPE_CHECKING:
    from rendezvous.store.protocol import Store

_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Figure:
    store: str
    nodes: int
    jobs: int
    writes_per_s: float
    p50_ms: float
    p99_ms: float


def state_of(nodes: int) -> JobState:
    """A running job, all of whose nodes are known by name, address and place."""
    members, placements = [], []
    for i in range(nodes):
        agent = AgentId(f"node-{i:05d}.cluster.example", f"{i * 0x9E3779B97F4A7C15 % 2**64:016x}")
        address = f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}"
        facts = NodeFacts(agent.node, address, 8, scheduler_index=i, block=f"rack{i // 16}")
        members.append((agent.node, Member(agent, facts, i, i)))
        placements.append(Placement(agent, facts, i, 8 * i, 8 * i))
    world = World(1, tuple(placements))
    empty = JobState(spec=JobSpec("bench", nodes, nodes), phase=Phase.RUNNING, generation=1, world=world)
    return replace(empty, members=type(empty.members)(members))


def decided(state: JobState) -> JobState:
    """After a decision about one node, each time another one: it is excluded, and has no place in the world."""
    number = state.restarts_used + 1
    node = f"node-{number % len(state.members):05d}.cluster.example"
    excluded = type(state.excluded)([(node, Exclusion(f"rank {number} failed there", float(number)))])
    decision = Decision(DecisionKind.RESTART, f"rank {number} of {node} exited with code 1", state.generation)
    return replace(
        state,
        restarts_used=number,
        excluded=excluded,
        members=state.members.plus(node, replace(state.members[node], node_rank=None)),
        decisions=(*state.decisions, decision)[-DECISIONS_KEPT:],
        as_of=float(number),
    )


async def measure(store: Store, name: str, nodes: int, jobs: int, seconds: float) -> Figure:
    state, took = state_of(nodes), []
    until = time.perf_counter() + seconds

    async def write(job_id: str) -> None:
        await store.ownership.claim(job_id)
        job, now = store.job(job_id), state
        _, version = await job.load()
        while time.perf_counter() < until:
            now = decided(now)
            started = time.perf_counter()
            version = await job.save(now, version)
            took.append(time.perf_counter() - started)
            await asyncio.sleep(0)

    started = time.perf_counter()
    await asyncio.gather(*(write(f"{nodes}-{i}") for i in range(jobs)))
    elapsed = time.perf_counter() - started
    for job_id in await store.jobs():
        await store.delete(job_id)
    took.sort()
    p50, p99 = took[len(took) // 2], took[min(len(took) - 1, int(len(took) * 0.99))]
    return Figure(name, nodes, jobs, len(took) / elapsed, p50 * 1e3, p99 * 1e3)


async def one_store(url: str, name: str, options: argparse.Namespace) -> list[Figure]:
    store = await open_store(url, "bench:0")
    try:
        return [
            await measure(store, name, nodes, jobs, options.seconds)
            for nodes in options.nodes
            for jobs in (1, _TOGETHER)
        ]
    finally:
        await store.close()


def play(options: argparse.Namespace) -> list[Figure]:
    found: list[Figure] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {"memory": "memory", "file": f"file:{folder}/store.db"}
        if shutil.which("etcd"):
            urls["etcd"] = stack.enter_context(running(folder)).url("bench")
        else:
            print("no etcd here (Debian: etcd-server): left out", file=sys.stderr)
        for number in range(options.rounds):
            for name, url in urls.items():
                print(f"round {number + 1}: {name}", file=sys.stderr)
                found += asyncio.run(one_store(url, name, options))
    return found


def table(found: list[Figure]) -> str:
    lines = [
        "| store | nodes of the job | writers | writes/s | p50 ms | p99 ms |",
        "|---|---|---|---|---|---|",
    ]
    for store, nodes, jobs in dict.fromkeys((f.store, f.nodes, f.jobs) for f in found):
        same = [f for f in found if (f.store, f.nodes, f.jobs) == (store, nodes, jobs)]
        rate, p50, p99 = (
            statistics.median(getattr(f, what) for f in same) for what in ("writes_per_s", "p50_ms", "p99_ms")
        )
        who = "alone" if jobs == 1 else f"{jobs} jobs"
        lines.append(f"| {store} | {nodes:,} | {who} | {rate:,.0f} | {p50:.2f} | {p99:.2f} |")
    return "\n".join(lines)


async def sizes(all_nodes: list[int]) -> list[str]:
    """What goes to a store: the whole state, and, of a large job, most of the time less."""
    found = []
    for nodes in all_nodes:
        packer, state, written = Packer(), state_of(nodes), []
        for _ in range(200):
            packed = await packer.pack(state)
            packer.stored(packed)
            written.append((len(packed.value) + len(packed.base or b"")) / 1024)
            state = decided(state)
        usual, most = statistics.median(written), max(written)
        found.append(
            f"{nodes:,} nodes {usual:.1f} KiB (median of {len(written)}; all of it: {most:,.0f} KiB)"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="per figure (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--nodes", type=int, nargs="+", default=[32, 4096], help="default 32 4096")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--write-docs", metavar="FILE", nargs="?", const=os.path.join(ROOT, "docs", "operations.md")
    )
    options = parser.parse_args()
    line, found = machine(), play(options)
    text = f"{table(found)}\n\nA write: {', '.join(asyncio.run(sizes(options.nodes)))}.\n\nMachine: {line}."
    publish("store", text, [{n: getattr(f, n) for n in f.__slots__} for f in found], options)


if __name__ == "__main__":
    main()
