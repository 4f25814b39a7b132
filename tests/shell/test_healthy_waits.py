"""Without a limit of the user: healthy programs that look as if they hang, and programs that do hang.

Here, a rank may be without a sign of life for three seconds instead of ten minutes.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launched import Launch, Launched

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_a_rank_that_lives_is_waited_for",
        "::test_what_hangs_by_the_evidence_of_all_ranks_ends",
        "core/test_hang_evidence.py",
    )
)

LIMIT_S = 3.0
_CODE = f"""
import sys
import launcher.settings.spec
launcher.settings.spec.ASLEEP_S = {LIMIT_S}
from launcher.cli import main
sys.exit(main(sys.argv[4:]))
"""
SHORT = (sys.executable, "-c", _CODE)

WAITS = """
import datetime, os, socket, subprocess, sys, threading, time
import torch, torch.distributed as dist

rank, for_s = int(os.environ["RANK"]), 9.0
until = lambda: iter(lambda: time.monotonic() < end, False)

def computes():
    for _ in until():
        sum(range(100000))

def prints():
    for number in until():
        print("file", number, flush=True)
        time.sleep(0.5)

def writes():
    with open("/dev/null", "wb", buffering=0) as file:
        for _ in until():
            file.write(bytes(1 << 16))
            time.sleep(0.3)

def starts_children():
    for _ in until():
        subprocess.run(["sleep", "0.5"])

def has_a_child_that_computes():
    code = f"import time; end = time.monotonic() + {for_s}\\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code])

def has_a_thread_that_computes():
    thread = threading.Thread(target=computes)
    thread.start()
    thread.join()

def reads_slowly():
    code = "import os, time\\nwhile True: os.write(1, bytes(500)); time.sleep(0.3)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    for _ in until():
        child.stdout.read(500)
    child.kill()
    child.wait()

def receives_slowly():
    ours = socket.socket()
    ours.bind(("127.0.0.1", 0))
    ours.listen()
    code = f"import socket, time\\nlink = socket.create_connection({ours.getsockname()})\\n"
    child = subprocess.Popen([sys.executable, "-c", code + "while True: link.send(bytes(3000)); time.sleep(0.3)"])
    link = ours.accept()[0]
    for _ in until():
        link.recv(3000)
    child.kill()
    child.wait()

def waits_for_a_daemon():
    code = f"import time\\nend = time.monotonic() + {for_s}\\nwhile time.monotonic() < end: sum(range(9999))"
    subprocess.run(f"setsid {sys.executable} -c '{code}' &", shell=True)
    time.sleep(for_s)

def prepares_for_long():
    time.sleep(for_s)

def is_waited_for_in_the_store():
    time.sleep(for_s)
    store.set("ready", "1")

def waits_in_the_store():
    store.wait(["ready"])

mode = sys.argv[1:]
timeout = datetime.timedelta(hours=2) if "prepares_for_long" in mode else None
dist.init_process_group("gloo", timeout=timeout)
store = dist.distributed_c10d._get_default_store()
for name in mode:
    end = time.monotonic() + for_s
    if rank == 0:
        globals()[name]()
    elif name == "is_waited_for_in_the_store":
        waits_in_the_store()
    dist.barrier()
dist.destroy_process_group()
"""


def said(job: Launched) -> list[str]:
    return [line for line in job.stderr().splitlines() if "rank" in line and "goodput" not in line]


def assert_left_alone(job: Launched) -> None:
    assert job.wait() == 0, job.stderr()
    assert not said(job), job.stderr()


def test_a_rank_that_lives_is_waited_for(launch: Launch) -> None:
    assert_left_alone(launch("--nproc-per-node", "2", "SCRIPT", "writes", source=WAITS, before=SHORT))


@NIGHTLY
@pytest.mark.parametrize(
    "modes",
    [
        ("computes", "has_a_thread_that_computes", "has_a_child_that_computes"),
        ("starts_children", "reads_slowly", "prints"),
        ("receives_slowly", "waits_for_a_daemon"),
        ("prepares_for_long",),
        ("is_waited_for_in_the_store",),
    ],
)
def test_so_is_any_other_one(launch: Launch, modes: tuple[str, ...]) -> None:
    assert_left_alone(launch("--nproc-per-node", "2", "SCRIPT", *modes, source=WAITS, before=SHORT))


ALONE = """
import subprocess, sys, time
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
subprocess.run(["sleep", "12"])
"""
UPLOADS = """
import atexit, os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    atexit.register(time.sleep, 12.0)
dist.barrier()
dist.destroy_process_group()
"""
SERVES = """
import http.server, threading
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
threading.Timer(12, server.shutdown).start()
server.serve_forever()
"""


@NIGHTLY
@pytest.mark.parametrize(("source", "ranks"), [(ALONE, 1), (ALONE, 2), (UPLOADS, 2), (SERVES, 2)])
def test_where_nobody_waits_nothing_is_said(launch: Launch, source: str, ranks: int) -> None:
    assert_left_alone(launch("--nproc-per-node", str(ranks), "SCRIPT", source=source, before=SHORT))


HANGS = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1 and sys.argv[1] == "sleeps":
    time.sleep(600)
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones(4))
dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sleeps", r"rank 1 on .* has made no progress for .*rank 0 has waited for it for .* in barrier"),
        pytest.param(
            "differs",
            r"the ranks called different collectives: .*barrier #.*all_reduce #",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_hangs_by_the_evidence_of_all_ranks_ends(launch: Launch, how: str, says: str) -> None:
    job = launch("--nproc-per-node", "2", "SCRIPT", how, source=HANGS, before=SHORT)
    assert job.wait() == 124, job.stderr()
    told = re.sub(r"\s*│\s*", " ", job.stderr())
    assert re.search(says, told), job.stderr()
