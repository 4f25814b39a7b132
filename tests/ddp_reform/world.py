"""Ranks that survive one another, without a launcher: a world whose dead ranks are replaced while the others live.

Each rank runs a `top`, as a script does before it trains, and keeps what that returned. Then it runs the functions that
it is sent, with that value. `heal` gives the survivors the environment of a new generation, and lets them form their
groups anew. Dead ranks are replaced by processes that run `top` again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ddp
import ddp.shm
from ddp.groups import joining, reform
from ddp.telemetry import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "ddp.shm", "world"])
PATIENCE_S = 60.0
PAUSED_AGAIN = "the launcher pauses this rank once more"


class Failed(AssertionError):
    """What a rank raised, as text."""


class World:
    """`hosts`: on which host each rank is, by a number; all on one by default."""

    def __init__(
        self, size: int, top: Callable[..., Any], *args: Any, hosts: Sequence[int] = (), **env: str
    ) -> None:
        self._top, self._args, self._env = _name(top), args, env
        self._hosts = list(hosts)
        self._generation = 0
        self.size = size
        self.processes: dict[int, Any] = {}
        self._pipes: dict[int, Any] = {}
        self._next_generation(size)
        for rank in range(size):
            self._start(rank, joins=False)
        self.answers(range(size))

    def _next_generation(self, size: int) -> None:
        self._generation += 1
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def place(self, rank: int) -> dict[str, str]:
        hosts = self._hosts[: self.size] or [0] * self.size
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "DDP_HOST_KEY": f"host{hosts[rank]}",
            "DDP_GENERATION": str(self._generation),
            **self._env,
        }

    def _start(self, rank: int, joins: bool) -> None:
        ours, theirs = _FORKS.Pipe()
        env = self.place(rank) | ({"DDP_JOINS": "1"} if joins else {})
        process = _FORKS.Process(target=_serve, args=(theirs, env, self._top, self._args), daemon=True)
        process.start()
        theirs.close()
        self.processes[rank], self._pipes[rank] = process, ours

    def tell(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> None:
        for rank in self.processes if ranks is None else ranks:
            with contextlib.suppress(OSError):
                self._pipes[rank].send((_name(function), args))

    def answers(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """What each rank returned; the last error that one of them raised is raised here."""
        found = [self.answer(rank) for rank in (sorted(self.processes) if ranks is None else ranks)]
        if wrong := [text for good, text in found if not good]:
            raise Failed("\n".join(map(str, wrong)))
        return [value for _, value in found]

    def answer(self, rank: int) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(PATIENCE_S):
                answer: tuple[bool, Any] = pipe.recv()
                return answer
        except (EOFError, ConnectionError):
            return False, f"rank {rank} died"
        return False, f"rank {rank} did not answer within {PATIENCE_S} s"

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.tell(function, *args)
        return self.answers()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
            self.processes.pop(rank).join()
            self._pipes.pop(rank).close()

    def bury(self, rank: int) -> None:
        """Forget a rank that has ended itself."""
        self.processes.pop(rank).join()
        self._pipes.pop(rank).close()

    def pause(self, *ranks: int) -> None:
        """As the launcher does while these ranks wait for others in `reform`."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)

    def heal(self, places: dict[int, int] | None = None, size: int | None = None) -> list[Any]:
        """Form the next generation: `places`: the new rank of each survivor, by its rank; others are replaced.

        Return how long each rank took, in order; None for replacements.
        """
        self.begin_healing(places, size)
        return self.answers()

    def begin_healing(self, places: dict[int, int] | None = None, size: int | None = None) -> None:
        places = {rank: rank for rank in self.processes} if places is None else places
        self._next_generation(size or self.size)
        processes = {now: self.processes[before] for before, now in places.items()}
        pipes = {now: self._pipes[before] for before, now in places.items()}
        self.processes, self._pipes = processes, pipes
        for rank in range(self.size):
            if rank in processes:
                self._pipes[rank].send(("continue", self.place(rank)))
            else:
                self._start(rank, joins=True)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__name__


def _find(name: tuple[str, str]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(name[0]), name[1])
    return found


def _serve(pipe: Any, env: dict[str, str], top: tuple[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    joining.install()
    gc.freeze()
    _abort_on_signal()
    state: list[Any] = []

    def start() -> None:
        state.append(_find(top)(*args))
        joining.joined()

    pipe.send(_outcome(start))
    while True:
        try:
            what, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        if what == "continue":
            os.environ.update(args)
            os.environ.pop("DDP_JOINS", None)
            pipe.send(_outcome(_reform))
        else:
            pipe.send(_outcome(_find(what), state[0], *args))


def _abort_on_signal() -> None:
    """Abort from another thread, as the guard does: the main one may be in a wait of torch, where no handler runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def wait() -> None:
        while signal.sigwait({signal.SIGUSR1}):
            guard.start().abort(PAUSED_AGAIN)

    threading.Thread(target=wait, daemon=True).start()


def _reform() -> float:
    _pause()
    began = time.monotonic()
    reform.reform()
    return time.monotonic() - began


def _pause() -> None:
    """Do what the guard does when the launcher pauses a rank, and continues it."""
    ours = guard.start()
    ours.abort("the world heals")
    ours.go_on()


def _outcome(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except BaseException:
        return False, traceback.format_exc()[-4000:]


# --- tops, and what is run -----------------------------------------------------------------------------


def only_groups(backend: str) -> dict[str, Any]:
    """A default group, a group of all ranks, and one of the first two ranks."""
    state = one_group(backend)
    state["everybody"] = dist.new_group(list(range(dist.get_world_size())))
    state["pair"] = dist.new_group([0, 1])
    return state


def one_group(backend: str) -> dict[str, Any]:
    ddp.init(backend)
    return {"world": dist.group.WORLD}


def chosen() -> dict[str, Any]:
    """A default group whose backend `ddp.init` chooses, and a group of all ranks beside it."""
    ddp.init()
    return {"world": dist.group.WORLD, "everybody": dist.new_group(list(range(dist.get_world_size())))}


def named(state: dict[str, Any]) -> tuple[str, set[str], bool]:
    """What `ddp.init` says, the backends by torch's tables, and whether the groups are the objects that they were."""
    groups = [dist.group.WORLD, state["everybody"]]
    names = {dist.get_backend(each) for each in groups} | {each.getBackendName() for each in groups}
    return ddp.init().backend, names, groups[0] is state["world"]


def total(_state: dict[str, Any]) -> float:
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    return float(tensor[0])


def torch_alone(backend: str) -> dict[str, Any]:
    """As a script does that does not call ddp.init()."""
    guard.start()
    dist.init_process_group(backend)
    return {"world": dist.group.WORLD}


def sums(state: dict[str, Any]) -> dict[str, float]:
    """The sum of rank + 1, in each group, through the objects that the script has kept."""
    found = {}
    for name in ("world", "everybody", "pair"):
        group = state.get(name, dist.GroupMember.NON_GROUP_MEMBER)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.full((1000,), float(dist.get_rank() + 1))
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(tensor[0]).all()
            found[name] = float(tensor[0])
    plain = torch.ones(3)
    dist.all_reduce(plain)
    found["plain"] = float(plain[0])
    return found


def fails(state: dict[str, Any]) -> str:
    """An all-reduce that a dead rank never joins."""
    try:
        sums(state)
    except RuntimeError as error:
        return str(error)
    return ""


# --- torch's interface for reconfiguration -----------------------------------------------------------------


def reconfigured(_state: dict[str, Any], number: int, handles: list[str]) -> tuple[int, int, float]:
    """Reconfigure the default group; return this process's new rank, the size, and a sum over the new members."""
    group = dist.group.WORLD
    options = SimpleNamespace(uuid=number, handles=handles, timeout=timedelta(seconds=30), hints=None)
    assert group.reconfigure(options).wait()
    total = torch.full((4,), dist.get_rank() + 1.0)
    group.allreduce([total]).wait()
    return group.rank(), group.size(), float(total[0])


def handle(_state: dict[str, Any]) -> str:
    assert dist.group.WORLD.supports_reconfigure
    return str(dist.group.WORLD.get_reconfigure_handle())


def refused(_state: dict[str, Any], number: int, handles: list[str]) -> str:
    try:
        reconfigured(_state, number, handles)
    except RuntimeError as error:
        return str(error)
    return ""


def sent_around(_state: dict[str, Any]) -> float:
    """What the rank before this one has sent, over the backend beside the core; and a broadcast."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given, got = torch.full((4,), rank + 1.0), torch.zeros(4)
    sending = dist.isend(given, (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sending.wait()
    first = torch.full((4,), float(rank))
    dist.group.WORLD.broadcast([first]).wait()
    assert first.eq(0).all()
    return float(got[0])


def aborted(_state: dict[str, Any]) -> None:
    dist.group.WORLD.abort()


# --- what a process uses -----------------------------------------------------------------------------------


def footprint(_state: dict[str, Any]) -> tuple[int, int, int]:
    """Descriptors, threads, and resident memory in MiB, when nothing is being let go any more."""
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S / 2
    while any(each.name == "ddp-let-go" for each in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    tasks = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), tasks, int(resident.split()[1]) >> 10


# --- groups at other times -----------------------------------------------------------------------------------


def another_group_before_training(state: dict[str, Any]) -> None:
    state["late"] = dist.new_group([0, 1])
    reform.mark()


def group_of_the_loop(_state: Any) -> tuple[float, str]:
    group = dist.new_group([0, 1])
    tensor = torch.full((10,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    return float(tensor[0]), str(group.group_name)


def group_before_run(_state: dict[str, Any]) -> list[str]:
    """What the launcher is told if the script creates a group between `resume` and `run`."""
    told: list[str] = []
    guard.cannot_heal = told.append  # type: ignore[assignment]
    dist.new_group([0, 1])
    joining.trains()
    return told


def begins_to_train(_state: dict[str, Any]) -> list[str]:
    told: list[str] = []
    guard.cannot_heal = told.append  # type: ignore[assignment]
    joining.trains()
    return told


def after_resume(_state: dict[str, Any]) -> list[str]:
    """What a replacement may do between `resume` and `run`, and what it is told otherwise."""
    joining.resumed()
    dist.barrier()
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    tries = (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.new_group([0, 1]), joining.joined)
    said = []
    for attempt in tries:
        try:
            attempt()
        except joining.JoiningError as error:
            said.append(str(error))
    joining.trains()
    return said
