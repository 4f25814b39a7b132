"""Rank 1 is killed in the middle of a message of rank 0, which Gloo then forgets. Rank 2 waits for rank 0."""

import contextlib
import json
import os
import re
import signal
import threading
import time

import torch
import torch.distributed as dist

import ddp
from ddp import elastic

MANY = 64 << 20
EPOLLOUT = 4


def until(condition):
    while not condition():
        time.sleep(0.002)


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def gloo_has_more_to_send():
    masks = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/fdinfo/{name}") as file:
            masks += re.findall(r"^tfd:\s*\d+ events:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    return any(int(mask, 16) & EPOLLOUT for mask in masks)


def kill_in_the_middle(pid):
    until(gloo_has_more_to_send)
    os.kill(pid, signal.SIGKILL)


def steps():
    rank, generation = dist.get_rank(), int(os.environ["DDP_GENERATION"])
    with open(f"{os.environ['THERE']}/told-{rank}", "a") as file:
        file.write(json.dumps({"generation": generation, "pid": os.getpid()}) + "\n")
    message = torch.zeros(MANY if generation == 1 else 1)
    store = dist.PrefixStore(f"pids{generation}", dist.distributed_c10d._get_default_store())
    if rank == 1:
        store.set("pid", str(os.getpid()))
        work = dist.irecv(message, 0)
        if generation == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
    elif rank == 0:
        pid = int(store.get("pid"))
        if generation == 1:
            until(lambda: is_stopped(pid))
            threading.Thread(target=kill_in_the_middle, args=(pid,), daemon=True).start()
        dist.send(message, 1)
        dist.send(torch.zeros(1), 2)
    else:
        dist.recv(torch.zeros(1), 0)


ddp.init("gloo", timeout=600)
elastic.State(step=0).run(steps)
ddp.shutdown()
