"""What the ranks run when something is about to go wrong."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ddp.groups.shm

BIG = 40_000_000  # bytes of many turns: whoever dies after a few leaves the others in the middle


def collective(kind, numel=1000):
    world = dist.get_world_size()
    tensor, many = torch.ones(numel), torch.ones(numel * world)
    group = dist.group.WORLD
    match kind:
        case "all-reduce":
            dist.all_reduce(tensor)
        case "average":
            bucket = group.ddp_allocate(numel, torch.float32).fill_(1)
            group.ddp_average([bucket], world).wait()
        case "broadcast":
            dist.broadcast(tensor, 1)
        case "all-gather":
            group._allgather_base(many, tensor).wait()
        case "reduce-scatter":
            group._reduce_scatter_base(tensor, many).wait()
        case "reduce":
            dist.reduce(tensor, 0)
        case "barrier":
            dist.barrier()


def collectives_for_ever(kind):
    """Until one fails; what it says."""
    while True:
        try:
            collective(kind, BIG // 4 // 40)
        except dist.DistBackendError as error:
            return time.monotonic(), str(error)


def collectives_until_killed(kind, ready):
    """The death falls inside a collective: this thread does nothing else."""
    collective(kind, BIG // 4 // 40)
    open(ready, "w").close()
    while True:
        collective(kind, BIG // 4 // 40)


def train_until_a_peer_is_gone(ready):
    """torch's own DDP, whose C++ waits for our futures."""
    from torch.nn.parallel import DistributedDataParallel
    from training import model

    module = DistributedDataParallel(model(), broadcast_buffers=False)
    while True:
        try:
            module(torch.randn(8, 32)).square().mean().backward()
        except RuntimeError as error:
            return time.monotonic(), str(error)
        if dist.get_rank() == 1:
            open(ready, "w").close()


def wait_for_somebody_who_does_not_come(kind):
    try:
        collective(kind)
    except dist.DistBackendError as error:
        return time.monotonic(), str(error)


def time_out_alone(timeout_s):
    """-> of each that comes: when it came, when it gave up, and by what words."""
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))
    if dist.get_rank() == 1:
        return None
    came = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        return came, time.monotonic(), str(error)


def coalesced_alone(kind):
    """-> whether each way to ask a failed operation of several tensors raises, and what it says about itself."""
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        return None
    world = dist.get_world_size()
    small, large = [torch.ones(2), torch.ones(3)], [torch.zeros(2 * world), torch.zeros(3 * world)]
    if kind == "all-gather":
        work = group.allgather_into_tensor_coalesced(large, small)
    else:
        work = group.reduce_scatter_tensor_coalesced(small, large)
    raised = []
    for ask in (lambda: work.get_future().wait(), work.wait):
        try:
            ask()
            raised.append(False)
        except RuntimeError:
            raised.append(True)
    return raised, work.is_success(), type(work.exception()).__name__


def form_a_group_alone():
    """Rank 1 comes when the other has given up, and all counts are as they were."""
    ddp.groups.shm.MIN_CREATION_S = 0.2
    if dist.get_rank() == 1:
        dist.barrier()
    began = time.monotonic()
    try:
        dist.new_group(backend="shm", timeout=timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        return time.monotonic() - began, str(error)
    finally:
        if dist.get_rank() == 0:
            dist.barrier()


def wait_with_a_limit():
    group = dist.new_group(backend="shm")
    tensor = torch.ones(3)
    if dist.get_rank() != 0:
        dist.barrier()
        dist.all_reduce(tensor, group=group)
        return True
    work = dist.all_reduce(tensor, group=group, async_op=True)
    try:
        work.wait(timedelta(seconds=0.1))
    except dist.DistBackendError:
        assert not work.is_completed()
        dist.barrier()
        return work.wait() and work.is_success() and work.exception() is None


def abort_from_another_thread():
    """-> how long after the abort the waiter was released, and by what words."""
    group = dist.new_group(backend="shm")
    dist.barrier()
    if dist.get_rank() == 1:
        at = time.monotonic()
        group.abort()
        return at, ""
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        return time.monotonic(), str(error)


def disagree(how):
    group = dist.new_group(backend="shm")
    odd = dist.get_rank() == 1
    try:
        match how:
            case "size":
                dist.all_reduce(torch.ones(100_000 if odd else 3), group=group)
            case "type":
                dist.all_reduce(torch.ones(3, dtype=torch.int32 if odd else torch.float32), group=group)
            case "root":
                dist.broadcast(torch.ones(3), int(odd), group=group)
            case "reduction":
                dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)
            case "kind" if odd:
                dist.barrier(group=group)
            case "tag":
                group.ddp_average([torch.ones(3)], 2.0, 1 << 40 | (6 if odd else 5) << 12).wait()
            case _:
                dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        return str(error)


def disagree_across_hosts(mine):
    """`mine`: for each rank, the collective that it calls."""
    group = dist.new_group(backend="hier")
    dist.barrier(group=group)
    numel, dtype, op = mine[dist.get_rank()]
    try:
        if op is None:
            dist.barrier(group=group)
        else:
            dist.all_reduce(torch.ones(numel, dtype=dtype), op, group=group)
    except dist.DistBackendError as error:
        return str(error)


def wait_for_other_hosts(absent, timeout_s):
    group = dist.new_group(backend="hier", timeout=timedelta(seconds=timeout_s))
    if dist.get_rank() in absent:
        return None
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        return str(error)


def leave_early():
    group = dist.new_group(backend="shm")
    dist.all_reduce(torch.ones(3), group=group)
    if dist.get_rank() == 1:
        group.shutdown()
        return None
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        return time.monotonic() - began, str(error)


def leave_with_work_under_way():
    """Who leaves a group gets an outcome for all that was started: an error where it could not be done."""
    group = dist.new_group(backend="shm")
    if dist.get_rank() != 0:
        dist.barrier()
        return None
    tensor = torch.ones(3)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]
    future = works[1].get_future()
    group.shutdown()
    dist.barrier()
    said = []
    for wait in (works[0].wait, future.wait, works[2].wait):
        try:
            wait()
        except RuntimeError as error:
            said.append(str(error))
    return said


def wait_in_a_callback():
    """As torch's PowerSGD hook does: a callback of one future begins another collective and waits for it."""

    def again(done):
        (tensor,) = done.value()
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    return first.then(again).wait().tolist()


class Stop(Exception):
    pass


def signal_while_waiting():
    """A signal's own code runs while the collective waits; what it raises comes out of it."""
    group = dist.new_group(backend="shm")
    dist.barrier()
    if dist.get_rank() == 1:
        return None

    def stop(*_):
        raise Stop

    previous = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    began = time.monotonic()
    try:
        timer.start()
        dist.all_reduce(torch.ones(3), group=group)
    except Stop:
        return time.monotonic() - began
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


def use_in_a_child():
    """A forked child can neither use the group, nor harm it by leaving, nor keep its parent's death a secret."""
    group = dist.group.WORLD
    bucket = group.ddp_allocate(100_000, torch.float32).fill_(1)
    dist.barrier()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
            said = "it worked"
        except RuntimeError as error:
            said = str(error)
        os.write(writer, said.encode())
        del bucket, group
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    assert (bucket == 1).all()
    group.ddp_average([bucket], 1.0).wait()
    assert (bucket == dist.get_world_size()).all()
    return said


def prepare_to_go_on():
    """-> each in turn, when a peer is gone: what uses the group of an earlier step again."""
    from ddp import DistributedDataParallel

    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    batch = torch.ones(8, 4)
    plain = DistributedDataParallel(layers[0])
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    for each in (plain, model):
        each(batch).sum().backward()
    output = plain(batch)
    global _uses
    _uses = {
        "backward": lambda: output.sum().backward(),
        "forward": lambda: model(batch),
        "the other forward": lambda: plain(batch).sum().backward(),  # which keeps its wrapper until here
        "new model": lambda: DistributedDataParallel(torch.nn.Linear(2, 2)),
    }


def go_on():
    """-> what raises something else than a CommError"""
    from ddp import CommError

    others = []
    for name, use in _uses.items():
        try:
            use()
        except CommError:
            continue
        except RuntimeError as error:
            others.append((name, str(error)))
        else:
            others.append((name, "nothing"))
    return others


def past_a_broken_core():
    """-> whether what goes past the core says the same as the core."""
    said = []
    for use in (lambda: dist.barrier(), lambda: dist.send(torch.ones(3), 1)):
        try:
            use()
        except dist.DistBackendError as error:
            said.append("rank 1 died" in str(error))
    return said


def write_gradients_in_a_child():
    """As a worker of a DataLoader that is forked between a backward and the step. -> what the child saw and left"""
    from ddp import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(600, 600), gradient_as_bucket_view=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 600)).sum().backward()
    mine = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in mine]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        same = all(map(torch.equal, mine, before))
        for gradient in mine:
            gradient.fill_(float("nan"))
        again = os.fork()  # and its own child has what it wrote
        if again == 0:
            os._exit(not all(gradient.isnan().all() for gradient in mine))
        kept = os.waitpid(again, 0)[1] == 0
        os.write(writer, b"yes" if same and kept else b"no")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        child_is_right = answer.read() == "yes"
    os.waitpid(child, 0)
    untouched = all(map(torch.equal, mine, before))
    dist.barrier()
    return child_is_right, untouched


def die_with_a_child(pid_file):
    """The child keeps all that it inherited; peers must learn of the parent's death all the same."""
    child = os.fork()
    if child == 0:
        signal.pause()
    with open(pid_file, "w") as file:
        file.write(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def belongings():
    return (
        sorted(os.readlink(f"/proc/self/fd/{n}").partition(":[")[0] for n in open_files()),
        len(os.listdir("/proc/self/task")),
    )


def open_files():
    return [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]


def maps_of_shm():
    with open("/proc/self/maps") as maps:
        return sum("ddp-shm" in line for line in maps)


def groups_come_and_go(times):
    """What is left of many groups: files, threads, mappings.

    A thread of Python is there for a moment after it has been joined, and counted then also at the beginning.
    """

    def once():
        group = dist.new_group(backend="shm")
        bucket = group.ddp_allocate(1000, torch.float32).fill_(1)
        group.ddp_average([bucket], 1.0).get_future().wait()
        dist.destroy_process_group(group)

    def held():
        gc.collect()  # an earlier case's group may live on in the cycle of an exception and its traceback
        files, threads = belongings()
        return len(files), threads, maps_of_shm()

    once()
    dist.barrier()
    before = held()
    for _ in range(times):
        once()
    dist.barrier()
    deadline = time.monotonic() + 60
    while any(map(operator.gt, after := held(), before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, after


def nothing_after_destroy():
    dist.destroy_process_group()
    files, _threads = belongings()
    return [f for f in files if "ddp-shm" in f], maps_of_shm()


class HeldStore(dist.Store):
    """On the held rank, Gloo does not learn the addresses of its peers until one of them has formed the group."""

    def __init__(self, base, held):
        super().__init__()
        self.base, self.held, self.left_early = base, held, False

    def get(self, key):
        if self.held and "gloo/" in key:
            self.held = False
            with contextlib.suppress(RuntimeError):
                self.base.wait(["formed"], timedelta(seconds=1))
                self.left_early = True
        return self.base.get(key)

    def set(self, key, value):
        self.base.set(key, value)

    def add(self, key, number):
        return self.base.add(key, number)

    def check(self, keys):
        return self.base.check(keys)

    def wait(self, keys, timeout=timedelta(seconds=60)):
        self.base.wait(keys, timeout)


def form_while_one_is_held(held):
    """Whether a peer had formed the group while the held rank was still connecting to it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    base = dist.PrefixStore("held", dist.distributed_c10d._get_default_store())
    store = HeldStore(base, rank == held)
    dist.group.WORLD.form_again(store, rank, size, list(range(size)))
    base.set("formed", "yes")
    return store.left_early
