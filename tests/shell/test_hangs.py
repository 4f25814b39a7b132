"""Ranks that stand still: the right one is named, its stacks are taken, and training goes on soon after."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launched import Launch, Launched

LIMIT_S = 5.0
OPTIONS = ("--max-restarts", "1", "--hang-timeout", f"{LIMIT_S:g},first-step=60")

TRAIN = """
import ctypes, os, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", int(os.environ["RANK"])

def note(what):
    print(what, "pid", os.getpid(), flush=True)
    path = os.path.join(os.environ["THERE"], what)
    with open(path + ".part", "w") as file:
        file.write(f"{time.monotonic()} {os.getpid()}")
    os.rename(path + ".part", path)

def goes_wrong(at, step):
    return first and at == sys.argv[1] and rank == 1 and step == 60

class Samples(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, at):
        if goes_wrong("loader", at):
            note("wrong")
            threading.Lock().acquire() and threading.Lock().acquire()
            time.sleep(600)
        return torch.ones(4)

def in_native_code():
    note("wrong")
    block = ctypes.create_string_buffer(1 << 26)
    libc = ctypes.PyDLL(None)  # it keeps the interpreter's lock
    while True:
        libc.memset(block, 0, len(block))

dist.init_process_group("gloo")
if rank == 0 and not first:
    note("again")
model = torch.nn.Linear(4, 4)
for step, batch in enumerate(DataLoader(Samples())):
    model(batch).sum().backward()
    if goes_wrong("native", step):
        in_native_code()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    model.zero_grad()
dist.barrier()
"""


def moment(job: Launched, what: str) -> float:
    return float((job.there / what).read_text().split()[0])


def verdict(job: Launched) -> str:
    (line,) = [line for line in job.stderr().splitlines() if "; restarting with" in line]
    return line.removeprefix("ddp-launch: ")


def assert_back_in_time(job: Launched) -> None:
    """From what went wrong to ranks that meet again: twice the limit, `make faults` says; this machine may be busy."""
    took = moment(job, "again") - moment(job, "wrong")
    assert LIMIT_S <= took < 20 * LIMIT_S, f"{took:.2f} s\n{job.stderr()}"


@pytest.mark.nightly(instead=("core/test_diagnosis.py", "::test_the_report_holds_the_stack_of_the_rank"))
def test_the_one_who_is_the_reason_is_named_and_the_job_goes_on(launch: Launch) -> None:
    """It computes in native code, which holds the interpreter. bench/faults has the other ways to hang."""
    says = (
        r"rank 1 on .*: has made no progress for [\d.]+ s .*\(computing\); ranks 0 and 2 have waited for it"
    )
    job = launch("--nproc-per-node", "3", *OPTIONS, "SCRIPT", "native", source=TRAIN)
    assert job.wait() == 0, job.stderr()
    assert re.match(says, verdict(job)), job.stderr()
    assert_back_in_time(job)
    job.assert_nothing_left()


def test_the_report_holds_the_stack_of_the_rank(launch: Launch) -> None:
    """The last restart is used up: box, JSON and the exit code."""
    words = ("--nproc-per-node", "2", "--hang-timeout", "2", "SCRIPT", "loader")
    job = launch(*words, source=TRAIN)
    assert job.wait() == 124, job.stderr()
    cause = job.failure()["first_cause"]
    assert (cause["rank"], cause["class"]) == (1, "hang")
    assert "in its data loader" in cause["reason"]
    assert re.search(r'File ".*train\.py", line \d+ in __getitem__', cause["traceback"])
    assert "rank 0 has made no progress" in cause["traceback"]
    assert "thread" in cause["traceback"]
    assert "in __getitem__" in Path(cause["log"]).read_text()
    assert "rank 1" in job.stderr()
    assert 'File "' in job.stderr(), "the end of the stacks; how much of them the box has room for may differ"
