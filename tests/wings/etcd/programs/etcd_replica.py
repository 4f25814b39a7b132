"""One replica: owns a job as soon as nobody does, and writes it all the time. Says in JSON lines what becomes of it.

SIGUSR1 makes its event loop hang, until SIGUSR2. Its other threads go on.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import replace

from ddp_launch_wings.etcd import owner as etcd_owner
from rendezvous.store.open import open_store
from rendezvous.store.protocol import Conflict, OwnershipLost, Store


def say(what: str, **more: object) -> None:
    print(json.dumps({"what": what, "at": time.clock_gettime(time.CLOCK_BOOTTIME), **more}), flush=True)


async def own(store: Store, job_id: str) -> None:
    owner = await store.ownership.claim(job_id)
    if not owner.is_me:
        say("waits", owner=owner.address)
        return
    say("owns", fence=owner.fence)
    job = store.job(job_id)
    state, version = await job.load()
    while True:
        try:
            version = await job.save(replace(state, generation=state.generation + 1), version)
        except Conflict:
            state, version = await job.load()
            continue
        except OwnershipLost:
            say("deposed")
            return
        state = replace(state, generation=state.generation + 1)
        say("saved", generation=state.generation, version=version, holds=store.ownership.holds(job_id))


async def main(url: str, address: str, job_id: str, ttl_s: str, hung_after_s: str) -> None:
    etcd_owner._TTL_S, etcd_owner.HUNG_AFTER_S = int(ttl_s), float(hung_after_s)
    store = await open_store(url, address)
    free = asyncio.Event()
    free.set()

    def lost(job: str) -> None:
        say("lost")
        free.set()

    store.ownership.listen(lost, lambda job: free.set())
    say("ready")
    while True:
        await free.wait()
        free.clear()
        await own(store, job_id)


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # in all threads: only `sigwait` takes it
signal.signal(signal.SIGUSR1, lambda number, frame: signal.sigwait({signal.SIGUSR2}))
asyncio.run(main(*sys.argv[1:]))
