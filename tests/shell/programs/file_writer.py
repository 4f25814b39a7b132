"""Writes one job and one value of a file store as fast as it can, and says which version is on the disk."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

from rendezvous.store.file import open_file_store


async def main(path: str) -> None:
    store = await open_file_store(path)
    job, values = store.job("j"), store.values("j")
    state, version = await job.load()
    while True:
        state = replace(state, generation=state.generation + 1)
        version, value = await asyncio.gather(
            job.save(state, version), values.put("k", str(state.generation).encode())
        )
        os.write(1, f"{state.generation} {version} {value}\n".encode())


asyncio.run(main(sys.argv[1]))
