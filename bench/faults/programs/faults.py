"""What the ranks of train.py can be told to do wrong, each by means that scripts have. True: it stood in for the usual.

A fault that blocks does so for good: only the launcher ends it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from train import Scene

LONG_S = 10_000.0


# --- a rank dies -------------------------------------------------------------------------------------


def raises(_scene: Scene) -> None:
    raise ValueError("the batch is bad")


def exits_3(_scene: Scene) -> None:
    sys.exit(3)


def leaves_7(_scene: Scene) -> None:
    os._exit(7)


def leaves_0(_scene: Scene) -> None:
    os._exit(0)


def segfaults(_scene: Scene) -> None:
    ctypes.string_at(0)


def aborts(_scene: Scene) -> None:
    os.abort()


def divides_by_zero(_scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGFPE)  # as the processor has it done


def reads_a_shrunken_file(scene: Scene) -> None:
    path = scene.folder / "shrinks"
    path.write_bytes(bytes(1 << 16))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        file.truncate(0)
        _ = mapped[1 << 15]


def kills_itself(_scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def allocates_beyond_its_limit(_scene: Scene) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + (1 << 26),) * 2)
    torch.zeros(1 << 28)


def outgrows_its_cgroup(scene: Scene) -> None:
    """As in a container: the kernel kills it."""
    folder = f"/sys/fs/cgroup/memory/fault-{os.getpid()}"
    os.mkdir(folder)
    with open(f"{folder}/memory.limit_in_bytes", "w") as file:
        file.write(str(1 << 26))
    with open(f"{folder}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    scene.note("cgroup", folder)
    held = bytearray(1 << 28)
    for at in range(0, len(held), mmap.PAGESIZE):
        held[at] = 1


def opens_too_much(_scene: Scene) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    _held = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]


def uses_up_its_time(_scene: Scene) -> None:
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + 1, spent + 20))
    loops(_scene)


def recurses(scene: Scene) -> None:
    recurses(scene)


def writes_to_a_full_disk(scene: Scene) -> bool:
    with open("/dev/full", "wb") as file:
        torch.save({"weights": torch.zeros(1 << 16)}, file)
        file.flush()
    return True


def writes_beyond_the_limit(scene: Scene) -> bool:
    """As a quota does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
    with (scene.folder / "weights").open("wb") as file:
        file.write(bytes(1 << 16))
    raise OSError(errno.EFBIG, "the limit did not hold")


def asks_a_dead_server(_scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    socket.create_connection(address)


# --- a rank stays away -------------------------------------------------------------------------------


def stops_itself(_scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps(_scene: Scene) -> None:
    time.sleep(LONG_S)


def sleeps_with_the_gil(_scene: Scene) -> None:
    """Neither a signal's Python function nor another thread runs any more."""
    ctypes.PyDLL(None).sleep(int(LONG_S))


def loops(_scene: Scene) -> None:
    while True:
        pass


def loops_in_native_code(_scene: Scene) -> None:
    """With the GIL held, for longer than anybody has."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def waits_for_a_lock(_scene: Scene) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_thread(_scene: Scene) -> None:
    """Two threads, each of which holds what the other wants."""
    one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def thread() -> None:
        with other:
            both.wait()
            one.acquire()

    threading.Thread(target=thread, daemon=True).start()
    with one:
        both.wait()
        other.acquire()


def waits_for_a_file_lock(scene: Scene) -> None:
    path = scene.folder / "lock"
    holder = multiprocessing.get_context("fork").Process(target=_holds, args=(path,), daemon=True)
    holder.start()
    while not path.with_suffix(".held").exists():
        time.sleep(0.001)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def _holds(path: os.PathLike[str]) -> None:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(f"{path}.held").touch()
        time.sleep(LONG_S)


def reads_a_fifo(scene: Scene) -> None:
    path = scene.folder / "fifo"
    os.mkfifo(path)
    path.read_text()


def waits_for_a_command(_scene: Scene) -> None:
    subprocess.run(["sleep", str(int(LONG_S))], check=True)


def waits_for_a_server(_scene: Scene) -> None:
    """Which took the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).recv(1)


def sleeps_beyond_signals(_scene: Scene) -> None:
    """Uninterruptible (D), as when a disk does not answer: vfork holds the parent until the child ends.

    The child shares the memory of its parent, so it does nothing but sleep, in one call.
    """
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.sleep(int(LONG_S))


def writes_to_a_fifo(scene: Scene) -> bool:
    """Which takes a little, and then nothing more: as a file system that is not there any more."""
    path = scene.folder / "model.fifo"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # a reader that never reads
    torch.save({"weights": torch.zeros(1 << 20)}, path)
    os.close(held)
    return True


def pauses(_scene: Scene) -> None:
    """Longer than any step so far, and within what is allowed."""
    time.sleep(1.0)


def evaluates_for_long(_scene: Scene) -> None:
    import ddp

    with ddp.section("eval", timeout=60):
        time.sleep(6.0)


def evaluates_for_too_long(_scene: Scene) -> None:
    import ddp

    with ddp.section("eval", timeout=1):
        time.sleep(LONG_S)


# --- a rank does something else ----------------------------------------------------------------------


def other_operation(scene: Scene) -> bool:
    dist.broadcast(torch.zeros(4, device=scene.device), 0)
    return True


def other_shape(scene: Scene) -> bool:
    dist.all_reduce(torch.zeros(1 << 12, device=scene.device))
    return True


def other_type(scene: Scene) -> bool:
    dist.all_reduce(torch.zeros(4, dtype=torch.float64, device=scene.device))
    return True


def skips(_scene: Scene) -> bool:
    """What the others do next, this rank takes for the next step's."""
    dist.barrier()
    return True


def is_done_early(_scene: Scene) -> bool:
    """Its data ends before that of the others: it waits at the end for them."""
    return True


def receives_from_nobody(scene: Scene) -> bool:
    """Everybody's neighbour is expected to send, and nobody does."""
    dist.recv(torch.zeros(4), (scene.rank + 1) % scene.world_size)
    return True


def waits_for_a_neighbour(scene: Scene) -> bool:
    """Rank 1 is to send to rank 0, and sleeps."""
    if scene.rank == 0:
        dist.recv(torch.zeros(4), 1)
    else:
        time.sleep(LONG_S)
    return True


def sends_too_little(scene: Scene) -> bool:
    """Rank 0 waits for a second message of rank 1, which has sent its only one and waits for an answer."""
    if scene.rank == 0:
        dist.recv(torch.zeros(4), 1)
    else:
        dist.isend(torch.zeros(4), 0).wait()
    dist.recv(torch.zeros(4), 1 - scene.rank)
    return True


def swaps_two_groups(scene: Scene) -> bool:
    first, second = scene.pairs if scene.rank != 1 else scene.pairs[::-1]
    dist.all_reduce(torch.zeros(4), group=first)
    dist.all_reduce(torch.zeros(4), group=second)
    return True


def is_the_root_of_a_chain(scene: Scene) -> bool:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another; rank 2 sleeps."""
    if scene.rank == 2:
        time.sleep(LONG_S)
    dist.all_reduce(torch.zeros(4), group=scene.pairs[1 if scene.rank else 0])
    return True


def gathers_objects_without_it(scene: Scene) -> bool:
    if scene.rank == 1:
        time.sleep(LONG_S)
    found: list[object] = [None] * scene.world_size
    dist.all_gather_object(found, {"rank": scene.rank})
    return True


def misses_the_barrier(scene: Scene) -> bool:
    if scene.rank == 1:
        time.sleep(LONG_S)
    dist.barrier()
    return True


def gathers_without_it(scene: Scene) -> bool:
    if scene.rank == 1:
        time.sleep(LONG_S)
    dist.all_gather([torch.zeros(4) for _ in range(scene.world_size)], torch.zeros(4))
    return True
