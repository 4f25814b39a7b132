"""A rank that looks for checkpoint requests heeds its launcher's signals, and not those of a scheduler's broadcast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from launched import Launched

from ddp.groups import core_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(core_loading.native() is None, reason="the guard is in the compiled core")

# The rest of ddp.elastic imports torch, which takes most of a second.
WATCHING = """
import os, sys, time, types
import ddp
elastic = sys.modules["ddp.elastic"] = types.ModuleType("ddp.elastic")
elastic.__path__ = [os.path.join(os.path.dirname(ddp.__file__), "elastic")]
from ddp.elastic import request
request._SIGNAL_GRACE_S = float(sys.argv[1])
request.watch()
print("watching", flush=True)
"""
# The interpreter's lock is held, as in a collective. A signal is taken in only where it is waited for, so that each
# can be seen to have come: two that nobody has taken yet are one.
DEAF = (
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))"
    + WATCHING
    + """
import ctypes
libc, every_signal = ctypes.PyDLL(None), bytes(128)
while True:
    libc.sigsuspend(every_signal)
    libc.write(1, b"came\\n", 5)
"""
)
LOOKING = (
    WATCHING
    + """
sys.stdin.readline()
if "answered" in sys.argv:
    request.checkpoint_done()
time.sleep(1.5 * request._SIGNAL_GRACE_S)
request.checkpoint_requested()
print("alive", flush=True)
sys.stdin.readline()
"""
)


class Rank:
    def __init__(self, folder: Path, source: str, *words: str) -> None:
        env = os.environ | {"DDP_CHECKPOINT_REQUEST": str(folder / "request"), "RANK": "0"}
        command = [sys.executable, "-c", source, *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        assert self.says() == "watching"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def goes_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hears_a_stranger(self, name: str = "TERM") -> None:
        """A shell in between: not the parent."""
        subprocess.run(["sh", "-c", f"kill -{name} {self.process.pid}"], check=True)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def start(*words: str) -> Rank:
        made.append(Rank(tmp_path, *words))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_strangers_signal_is_not_heeded_but_the_parents_is_at_once(
    rank: Callable[..., Rank], name: str
) -> None:
    one = rank(DEAF, "600")
    one.hears_a_stranger(name)
    assert one.says() == "came"
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(0.5)
    one.process.send_signal(signal.Signals[f"SIG{name}"])
    assert one.process.wait(60) == -signal.Signals[f"SIG{name}"]


def test_a_stranger_that_means_it_is_heeded_the_second_time(rank: Callable[..., Rank]) -> None:
    one = rank(DEAF, "0.2")
    one.hears_a_stranger()
    assert one.says() == "came"
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(0.5)
    one.hears_a_stranger()
    assert one.process.wait(60) == -signal.SIGTERM


def test_a_strangers_signal_is_heeded_when_nothing_comes_of_it(rank: Callable[..., Rank]) -> None:
    one = rank(LOOKING, "0.2")
    one.hears_a_stranger()
    one.goes_on()
    assert one.process.wait(60) == -signal.SIGTERM


def test_a_signal_that_a_checkpoint_has_answered_is_forgotten(rank: Callable[..., Rank]) -> None:
    """Also where the launcher has taken its question back before this rank could see it."""
    one = rank(LOOKING, "0.2", "answered")
    one.hears_a_stranger("USR1")
    one.goes_on()
    assert one.says() == "alive"


def test_what_comes_late_of_an_answered_broadcast_changes_nothing(rank: Callable[..., Rank]) -> None:
    one = rank(WATCHING + "request.checkpoint_done()\nprint('done', flush=True)\n" + HEEDS_NOW, "600")
    assert one.says() == "done"
    one.hears_a_stranger()
    one.goes_on()
    assert one.says() == "nothing to heed"


HEEDS_NOW = """
sys.stdin.readline()
from ddp.groups import core_loading
core_loading.native().guard_signal(12, 0.0)  # no patience any more: whatever is noted is overdue
print("overdue" if core_loading.native().overdue_signal() else "nothing to heed", flush=True)
"""

BLOCKED = """
import ctypes, os
import ddp
from ddp import elastic
import torch, torch.distributed as dist
place = ddp.init()
state = elastic.State(step=0)
state.resume()
assert not state.should_checkpoint()
open(os.path.join(os.environ["THERE"], f"blocked-{place.rank}"), "w").close()
if place.rank == 0:
    dist.all_reduce(torch.ones(1))
ctypes.PyDLL(None).sleep(600)
"""


def test_the_launcher_stops_ranks_that_are_blocked_in_a_collective_at_once(tmp_path: Path) -> None:
    job = Launched(tmp_path, "--nproc-per-node", "2", "--shutdown-timeout", "100", source=BLOCKED)
    try:
        job.await_there("blocked-0", "blocked-1", timeout_s=100)
        begin = time.monotonic()
        job.send(signal.SIGINT)
        assert job.wait(60) == 128 + signal.SIGINT, job.stderr()
        assert time.monotonic() - begin < 50, "not by the kill that follows --shutdown-timeout"
    finally:
        job.clean_up()
