"""N nodes meet through torch's c10d rendezvous, each in a process of its own.

    python bench/meet/torch_agents.py 32

One process imports torch; the N nodes, and c10d's store, are forked from it, so that memory allows for many. All
are connected before the clock starts: torch looks up names of addresses on the way, which takes seconds where no
name server answers, and is not what is measured here. Prints as JSON the seconds until the last `next_rendezvous`
returned, and the processor time of c10d's store until then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    nodes = int(sys.argv[1])
    store_pid, endpoint = _fork_store()
    ready, go, done, leave = (os.pipe() for _ in range(4))
    pids = [_fork(lambda: _node(nodes, endpoint, ready[1], go, done[1], leave)) for _ in range(nodes)]
    for end in (go[0], leave[0], ready[1], done[1]):
        os.close(end)
    _read(ready[0], nodes)
    before, began = _cpu_seconds(store_pid), time.monotonic()
    os.close(go[1])
    met = sorted(json.loads(line) for line in _read(done[0], nodes * 32).splitlines())
    cpu = _cpu_seconds(store_pid) - before
    os.close(leave[1])
    for pid in pids:
        os.waitpid(pid, 0)
    os.kill(store_pid, signal.SIGKILL)
    os.waitpid(store_pid, 0)
    if len(met) < nodes:
        sys.exit(f"{nodes - len(met)} of {nodes} nodes did not meet")
    print(json.dumps({"ready": met[-1] - began, "service_cpu": cpu}))


def _node(
    nodes: int, endpoint: str, ready: int, go: tuple[int, int], done: int, leave: tuple[int, int]
) -> None:
    os.close(go[1])
    os.close(leave[1])
    random.seed()  # or every fork draws the same delay, and c10d's nodes collide as they never would
    run_id = f"bench-{os.getppid()}"
    params = RendezvousParameters("c10d", endpoint, run_id, nodes, nodes, "127.0.0.1", is_host="0")
    backend, store = create_backend(params)
    handler = create_handler(store, backend, params)
    os.write(ready, b".")
    os.close(ready)
    os.read(go[0], 1)
    handler.next_rendezvous()
    os.write(done, f"{time.monotonic():<31}\n".encode())
    os.close(done)
    os.read(leave[0], 1)


def _fork_store() -> tuple[int, str]:
    """c10d's store without an agent around it, as our service has none."""
    told, tell = os.pipe()

    def serve() -> None:
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1)
        )
        os.write(tell, str(store.port).encode())
        os.close(tell)
        while True:
            time.sleep(3600)

    pid = _fork(serve)
    os.close(tell)
    return pid, f"127.0.0.1:{int(os.read(told, 16))}"


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read(fd: int, count: int) -> bytes:
    """`count` bytes, or as many as came before every writer was gone."""
    read = b""
    while len(read) < count and (more := os.read(fd, count - len(read))):
        read += more
    return read


def _cpu_seconds(pid: int) -> float:
    """All threads of the process, by the kernel's clock for it."""
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    main()
