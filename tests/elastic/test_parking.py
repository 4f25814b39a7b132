"""The guard of a rank that keeps its process: it is paused, parks, and goes on in the next generation."""

from __future__ import annotations

import inspect
import json
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from ddp.elastic import state
from ddp.groups.reform import CannotReform
from ddp.telemetry import blocked_thread, guard, status_page, torch_api
from ddp.telemetry import guard as guards
from ddp.telemetry.blocked_thread import BlockedThread
from ddp.telemetry.guard import Continue, Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path


class Agent:
    """The agent's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "guards")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen()

    def hears(self, guard: Guard) -> dict[str, Any]:
        guard.begin()
        line, _address = self._server.accept()
        self._line, self._file = line, line.makefile("r")
        return self.reads()

    def reads(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._file.readline())
        return found

    def sends(self, **message: Any) -> None:
        self._line.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        for each in (self._file, self._line, self._server):
            each.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("DDP_GENERATION", "4")
    found = Agent(tmp_path)
    yield found
    found.close()


class Group:
    """A group of torch.distributed in which a thread waits until it is aborted."""

    group_name = "fake"

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Group]:
    """Enters a new group in torch's table, as torch does after it has created one. Nobody tells the guard."""

    def create() -> Group:
        group = Group()
        monkeypatch.setitem(torch_api.world().pg_map, group, ("fake", None))
        return group

    return create


def test_a_group_that_is_newer_than_the_last_look_of_the_guard_is_aborted(
    agent: Agent, created: Callable[[], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of it waits for ranks that have left, and that have not known it either."""
    monkeypatch.setattr(guards, "_POLL_S", 3600.0)
    guard = Guard(agent.path)
    agent.hears(guard)
    group = created()
    agent.sends(abort="rank 0 died")
    assert agent.reads()["aborted"]["groups"] == 1
    assert group.is_aborted.is_set()
    guard.end()


def test_a_group_that_comes_after_the_pause_is_aborted_too(
    agent: Agent, created: Callable[[], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the rank has parked: the script was just creating the group."""
    monkeypatch.setattr(guards, "_POLL_S", 3600.0)
    guard = Guard(agent.path)
    agent.hears(guard)
    agent.sends(pause={"generation": 4, "reason": "rank 0 died"})
    assert agent.reads()["aborted"]["groups"] == 0
    assert created().is_aborted.wait(60.0)
    assert created().is_aborted.wait(60.0)
    agent.sends(**{"continue": {"generation": 5, "env": {}}})
    guard.park()
    assert guard._release.due_in_s() == float("inf")
    guard.end()


# The innermost function of a thread, as it would be in a module of this name.
WAITS_FOR_WORK = "def wait(work):\n    work.wait()\n"
BLOCKED = "def wait(lock):\n    lock.acquire()\n"
LOOKS_AGAIN = "def wait(lock):\n    while not lock.acquire(timeout=0.001): pass\n"


@pytest.fixture
def waiting() -> Iterator[Callable[[str, str, Callable[[], BlockedThread | None]], BlockedThread | None]]:
    """Starts a thread that calls `first`, and then waits in the module. Returns what `first` has returned."""
    lock, threads = threading.Lock(), list[threading.Thread]()
    lock.acquire()

    def start(module: str, source: str, first: Callable[[], BlockedThread | None]) -> BlockedThread | None:
        names: dict[str, Any] = {"__name__": module}
        exec(source, names)
        returned: queue.SimpleQueue[BlockedThread | None] = queue.SimpleQueue()

        def run() -> None:
            returned.put(first())
            names["wait"](lock)
            lock.release()

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return returned.get()

    yield start
    lock.release()
    for thread in threads:
        thread.join()


def test_a_rank_that_cannot_leave_its_collective_ends(
    agent: Agent, waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can end an operation that Gloo has forgotten: it is blocked without end, and nobody could tell why."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(guard, "_end_process", ended.put)
    monkeypatch.setattr(blocked_thread, "BLOCKED_S", 0.1)
    rank = Guard(agent.path)
    agent.hears(rank)
    waiting("torch.distributed.distributed_c10d", BLOCKED, lambda: rank.heals(True))
    agent.sends(pause={"generation": 4, "reason": "rank 0 died"})
    assert ended.get(timeout=60.0) == "wait in torch.distributed.distributed_c10d"
    rank.end()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("train", BLOCKED),
        ("torch.utils.data.dataloader", BLOCKED),
        ("torch.distributed.distributed_c10d", LOOKS_AGAIN),
    ],
)
def test_a_rank_that_may_still_leave_its_collective_is_not_ended(
    waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, module: str, source: str
) -> None:
    monkeypatch.setattr(blocked_thread, "BLOCKED_S", 0.1)
    thread = waiting(module, source, BlockedThread)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert thread.look() == ""
        time.sleep(0.05)


@pytest.fixture
def waits_for_a_message(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], BlockedThread]]:
    """Starts a thread in a script that waits for a message over Gloo. The message comes at the end of the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist.Work, "wait", inspect.unwrap(dist.Work.wait))  # comes back after the test
    monkeypatch.setattr(status_page, "_kept", {})
    store, limit = dist.HashStore(), timedelta(seconds=120)
    with ThreadPoolExecutor(2) as pool:
        receiver, sender = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timeout=limit), (0, 1))
        script: dict[str, Any] = {"__name__": "train"}
        exec(WAITS_FOR_WORK, script)
        started: queue.SimpleQueue[BlockedThread] = queue.SimpleQueue()

        def run() -> None:
            started.put(BlockedThread())
            script["wait"](receiver.recv([torch.zeros(1)], 1, 0))

        def start() -> BlockedThread:
            waiting.append(pool.submit(run))
            return started.get(timeout=60.0)

        waiting: list[Future[None]] = []
        yield start
        sender.send([torch.ones(1)], 0, 0).wait()
        waiting[0].result(timeout=60.0)


def test_a_wait_that_the_script_calls_is_one_for_a_collective(
    waits_for_a_message: Callable[[], BlockedThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody traces collectives: then the innermost function would be the script's, which may do anything."""
    monkeypatch.setattr(blocked_thread, "BLOCKED_S", 0.1)
    blocked_thread.show_waits()
    blocked_thread.show_waits()
    thread, until = waits_for_a_message(), time.monotonic() + 60.0
    while not (where := thread.look()) and time.monotonic() < until:
        time.sleep(0.05)
    assert where == "wait in train", "not the wrapper, which tells nobody anything"


def test_a_rank_is_paused_parks_and_goes_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(agent.path)
    assert "heals" not in agent.hears(guard)
    guard.heals(True)
    assert agent.reads() == {"heals": True}
    assert not guard.will_pause(0.0)
    agent.sends(pause={"generation": 4, "reason": "rank 0 died"})
    assert guard.will_pause(10.0)
    assert agent.reads()["aborted"]["hung"] == 0
    assert guard.find_broken() == "the launcher aborted communication: rank 0 died"
    agent.sends(**{"continue": {"generation": 5, "env": {"RANK": "0"}}})
    assert guard.park() == Continue(5, {"RANK": "0"})
    assert agent.reads() == {"parked": {"generation": 4}}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("DDP_GENERATION", "5")
    guard.go_on()
    hello = agent.reads()
    assert (hello["hello"], hello["generation"], hello["heals"]) == (0, 5, True)
    assert not guard.find_broken()
    assert not guard.will_pause(0.0)
    guard.end()


def test_a_pause_of_the_next_generation_is_not_lost(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank dies before this one has begun the generation."""
    guard = Guard(agent.path)
    agent.hears(guard)
    guard.heals(True)
    for generation in (4, 5):
        agent.sends(pause={"generation": generation, "reason": f"in {generation}"})
        agent.sends(**{"continue": {"generation": generation + 1, "env": {}}})
    assert [list(agent.reads()) for _ in range(3)] == [["heals"], ["aborted"], ["aborted"]]
    guard.park()
    monkeypatch.setenv("DDP_GENERATION", "5")
    guard.go_on()
    assert guard.will_pause(10.0)
    assert guard.find_broken()
    guard.end()


def test_a_rank_that_cannot_be_healed_is_not_paused(agent: Agent) -> None:
    guard = Guard(agent.path)
    agent.hears(guard)
    guard.heals(True)
    guard.cannot_heal("rank 1 communicates before state.run")
    assert [agent.reads(), agent.reads()] == [
        {"heals": True},
        {"cannot_heal": "rank 1 communicates before state.run"},
    ]
    assert not guard.will_pause(0.0)
    guard.end()


def test_without_a_launcher_nobody_pauses() -> None:
    guard = Guard("")
    guard.begin()
    guard.heals(True)
    assert not guard.will_pause(30.0)
    guard.end()


def test_a_process_that_cannot_go_on_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher shows the reason and restarts all ranks. A traceback of each rank would hide that."""
    told: list[str] = []
    watcher = SimpleNamespace(heals=lambda on: None, cannot_heal=told.append)
    monkeypatch.setattr(guards, "start", lambda: watcher)

    def attempt() -> None:
        raise CannotReform("no shard is left")

    with pytest.raises(SystemExit) as ended:
        state.run_healing(attempt)
    assert ended.value.code == 1
    assert told == ["no shard is left [DDP-7004]"]
    assert capsys.readouterr().err == "CannotReform: no shard is left [DDP-7004]\n"
