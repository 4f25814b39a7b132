"""Writes one job and one value of a file store as fast as it can, and says which version is on the disk.

    file_writer.py PATH [NODES]

With NODES, the job is that large, and each write changes one of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

from rendezvous.store.file import open_file_store
from rendezvous.values.job_state import JobState, Member
from rendezvous.values.types import AgentId, NodeFacts


def next_state(state: JobState, nodes: int) -> JobState:
    number = state.generation + 1
    state = replace(state, generation=number)
    for i in range(nodes) if len(state.members) < nodes else (number % nodes,) if nodes else ():
        agent = AgentId(f"node{i}", "1")
        member = Member(agent, NodeFacts(agent.node, "10.0.0.1", 8), number)
        state = replace(state, members=state.members.plus(agent.node, member))
    return state


async def main(path: str, nodes: int) -> None:
    store = await open_file_store(path)
    job, values = store.job("j"), store.values("j")
    state, version = await job.load()
    while True:
        state = next_state(state, nodes)
        version, value = await asyncio.gather(
            job.save(state, version), values.put("k", str(state.generation).encode())
        )
        os.write(1, f"{state.generation} {version} {value}\n".encode())


asyncio.run(main(sys.argv[1], int("".join(sys.argv[2:]) or 0)))
