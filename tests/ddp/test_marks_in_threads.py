"""Threads that communicate in groups of their own, while other groups come and go: nothing raises, all is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from launcher.health.pages import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import os, sys, threading, traceback
import torch, torch.distributed as dist
from ddp.telemetry import observing, status_page, torch_marks

torch_marks.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(6)]
sys.setswitchinterval(1e-6)
ROUNDS = 150
errors, over = [], threading.Event()

def communicate(group):
    t, kept = torch.ones(3), []
    for n in range(ROUNDS):
        kept.append(dist.all_reduce(t, group=group, async_op=True))
        if len(kept) > 2:
            kept.pop().wait() if n % 2 else kept.clear()
        dist.all_reduce(t, group=group)
        dist.all_reduce(t, group=group, async_op=True).get_future()
        with dist._coalescing_manager(group=group, async_ops=True) as both:
            dist.all_reduce(t, group=group)
            dist.all_reduce(t, group=group)
        both.wait()

def come_and_go():
    while not over.is_set():
        group = dist.new_group([0])
        dist.barrier(group)
        dist.destroy_process_group(group)

def noting(work, *args):
    try:
        work(*args)
    except BaseException:
        errors.append(traceback.format_exc())

threads = [threading.Thread(target=noting, args=(communicate, group)) for group in groups]
beside = threading.Thread(target=noting, args=(come_and_go,))
beside.start()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
over.set()
beside.join()
for group in groups:  # their slots on the page may show others
    dist.barrier(group)
assert not errors, errors[0]
assert all(each.is_on for each in observing._observers())
print(4 * ROUNDS + 1)
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close_all()


def test_threads_with_groups_of_their_own(pages: Pages) -> None:
    env = dict(os.environ) | pages.open(0, 5)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = int(done.stdout.splitlines()[-1])
    view = pages.ended(0)
    assert view is not None
    counts = [(group.entered, group.finished) for group in view.groups if group.entered > 10]
    assert counts == [(calls, calls)] * 6
