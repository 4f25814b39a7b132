"""A running job tells how its node is, who is slower than the others, and whoever asks over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from ports import free_port

from launcher.health.node_health import MIB, MemoryUse, Nic, Throttling
from launcher.health.node_watch import Node
from rendezvous.service.web import Web

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launched import Launch, Launched

STAYS = """
import os, time
from pathlib import Path
there = Path(os.environ["THERE"])
(there / f"rank{os.environ['RANK']}").touch()
while not (there / "finish").exists():
    time.sleep(0.01)
"""
PACED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from ddp.telemetry import status_page
page, finish = status_page.page(), os.path.join(os.environ["THERE"], "finish")
while not os.path.exists(finish):
    page.phase(status_page.DATA)
    time.sleep(0.05 if os.environ["RANK"] == "1" else 0.005)
    page.phase(status_page.COMMUNICATE)
    time.sleep(0.005 if os.environ["RANK"] == "1" else 0.05)
    page.step()
"""
REPOSITORY = str(Path(__file__).parents[2])


@pytest.fixture
def port() -> int:
    return free_port()


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def finish(job: Launched) -> None:
    (job.there / "finish").touch()
    assert job.wait() == 0, job.stderr()


# --- over HTTP -----------------------------------------------------------------------------------------


def test_probes_and_metrics_are_answered_on_this_machine_only(launch: Launch, port: int) -> None:
    job = launch("--nproc-per-node", "2", source=STAYS, env={"DDP_HEALTH_PORT": str(port)}, fake_torch="")
    job.await_there("rank0", "rank1")
    assert ask(port, "/livez") == (200, "alive\n")
    # The agent hears a moment later that a rank runs.
    eventually(lambda: ask(port, "/readyz") == (200, "ready\n"), what="it is ready")
    assert ask(port, "/metrics")[0] == 200
    eventually(lambda: "ddp_launch_ranks_running 2" in ask(port, "/metrics")[1].splitlines())
    eventually(lambda: "ddp_launch_memory_used_bytes" in ask(port, "/metrics")[1])
    finish(job)
    assert f"node health: http://127.0.0.1:{port}/livez" in job.stderr()
    assert ask(port, "/livez") == (0, "")


def test_an_agent_that_waits_for_others_is_alive_and_not_ready(launch: Launch, port: int) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    job = launch(
        *("--nnodes", "2", "--rendezvous", rendezvous, "--rdzv-id", "waits", "--nproc-per-node", "1"),
        *("--health-port", f"127.0.0.1:{port}"),
        source=STAYS,
        fake_torch="",
    )
    eventually(lambda: ask(port, "/livez")[0] == 200)
    assert ask(port, "/readyz") == (503, "not ready\n")
    job.agent.terminate()
    job.wait()


def test_a_port_that_is_taken_costs_the_probes_and_not_the_job(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = launch("--nproc-per-node", "1", "--health-port", str(port), source=STAYS, fake_torch="")
        job.await_there("rank0")
        finish(job)
    assert f"--health-port 127.0.0.1:{port}: cannot listen: " in job.stderr()


def test_livez_is_not_only_an_answer() -> None:
    async def answer(alive: bool) -> bytes:
        web = Web(lambda: True, str, lambda: alive)
        port = await web.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        await web.close()
        return said.split(b"\r\n")[0]

    assert asyncio.run(answer(True)) == b"HTTP/1.1 200 OK"
    assert asyncio.run(answer(False)) == b"HTTP/1.1 503 Service Unavailable"


def test_unfinished_requests_do_not_block_probes() -> None:
    """Or whoever reaches the port has the kubelet kill the service."""

    async def story() -> bytes:
        web = Web(lambda: True, str)
        port = await web.listen("127.0.0.1", 0)
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, unfinished in slow:
            unfinished.write(b"GET /livez HTTP/1.1\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        said = await reader.read()
        for each in (writer, *(unfinished for _, unfinished in slow)):
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()
        await web.close()
        return said.split(b"\r\n")[0]

    assert asyncio.run(story()) == b"HTTP/1.1 200 OK"


# --- stragglers ----------------------------------------------------------------------------------------


def test_a_slow_rank_is_named_on_the_terminal_while_it_runs(launch: Launch) -> None:
    job = launch(
        *("--nproc-per-node", "3", "--stragglers", "report,window=0.5s", "SCRIPT", REPOSITORY),
        source=PACED,
        fake_torch="",
    )
    named = eventually(lambda: re.search(r"ddp-launch: (rank \d on \S+ is slower.*)", job.stderr()))
    assert re.fullmatch(
        r"rank 1 on \S+ is slower than its peers: [\d.e+]+ m?s per step in its data loader, its peers [\d.e+]+ m?s",
        named[1],
    )
    finish(job)
    assert job.stderr().count("is slower than its peers") == 1


# --- the node ------------------------------------------------------------------------------------------


def test_what_is_read_of_a_node(tmp_path: Path) -> None:
    group = "/sys/fs/cgroup/mine"
    files = {
        "/proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
        "/proc/vmstat": "pswpin 3\npswpout 4\n",
        "/proc/net/dev": "Inter\n face\n  lo: 1 1 1 1 0 0 0 0 1 1 1 1 0 0 0 0\neth0: 9 9 2 3 0 0 0 0 9 9 4 5 0 0 0 0\n",
        "/sys/class/net/eth0/carrier": "1\n",
        "/proc/stat": "cpu  10 1 4 70 15 0 0 0 5 0\ncpu0 1 1 1 1\n",
        "/proc/diskstats": " 8 0 sda 1 2 30 4 5 6 70 8\n 8 1 sda1 1 2 9 4 5 6 9 8\n 7 0 loop0 1 2 9 4 5 6 9 8\n",
        "/sys/block/sda/size": "1\n",
        "/sys/block/loop0/size": "1\n",
        "/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "100\n",
        "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "7\n",
        "/proc/self/cgroup": "0::/mine\n",
        "/proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        f"{group}/cgroup.procs": "",
        f"{group}/cpu.max": "150000 100000\n",
        f"{group}/cpu.stat": "usage_usec 2500000\nnr_periods 40\nnr_throttled 10\n",
        f"{group}/memory.max": f"{100 * MIB}\n",
        f"{group}/memory.current": f"{90 * MIB}\n",
        f"{group}/memory.stat": f"anon {50 * MIB}\ninactive_file {10 * MIB}\n",
        f"{group}/memory.events": "oom 3\noom_kill 2\n",
        f"{group}/memory.pressure": "some avg10=9.00\nfull avg10=2.50 avg60=0.00 avg300=0.00 total=1\n",
    }
    for name, text in files.items():
        path = Path(f"{tmp_path}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    seen = Node([str(tmp_path)], root=str(tmp_path)).read()
    assert seen.memory == MemoryUse("the cgroup's limit", 80 * MIB, 100 * MIB, 2)
    assert (seen.stalled, seen.swapped) == (2.5, 7 * os.sysconf("SC_PAGE_SIZE"))
    eth0, port = Nic("eth0", 6, 8, True, 9, 9), Nic("mlx5_0/1", 7, 0, True, 400, 0)
    assert seen.nics == (eth0, port)
    assert (seen.cpu, seen.disk) == ((15, 100), (30 * 512, 70 * 512))
    assert seen.throttling == Throttling(40, 10, 1.5, 2.5)
    assert seen.disks[0].total > seen.disks[0].free > 0
    Path(f"{tmp_path}{group}/memory.max").write_text("max\n")
    machine = Node(root=str(tmp_path)).read().memory
    assert machine is not None
    assert machine.whose == "the machine's memory"


def test_a_node_of_which_nothing_can_be_read_is_well(tmp_path: Path) -> None:
    seen = Node(["/no/such/folder"], root=str(tmp_path)).read()
    assert (seen.memory, seen.throttling, seen.nics, seen.disks) == (None, None, (), ())


LIMIT_MIB = 600  # the process that keeps the store has a part of torch
# At 96 to 97 % of the limit, whatever others in the group take or give back meanwhile: the process that keeps the store
# may still be importing when the rank has filled the rest.
GREEDY = """
import os, time
from pathlib import Path
there, cgroup = Path(os.environ["THERE"]), Path(os.environ["CGROUP"])
kept = []
def share():
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    used = int((cgroup / "memory.usage_in_bytes").read_text()) - int(stat["total_inactive_file"])
    return used / int((cgroup / "memory.limit_in_bytes").read_text())
while not (there / "enough").exists():
    if share() < 0.96:
        kept.append(bytearray(1 << 20))
        kept[-1][::4096] = b"1" * 256
    elif share() > 0.97 and kept:
        kept.pop()
    time.sleep(0.001)
while True:
    kept.append(b"1" * (1 << 20))
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    folder = Path(f"/sys/fs/cgroup/memory/ddp-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT_MIB * MIB))
        # Until the test permits it, who needs more than there is waits, and nobody is killed.
        (folder / "memory.oom_control").write_text("1")
        yield folder
    finally:
        (folder / "memory.oom_control").write_text("0")
        eventually(lambda: not (folder / "cgroup.procs").read_text())
        for inner in folder.iterdir():
            if inner.is_dir():
                inner.rmdir()
        folder.rmdir()


def test_memory_that_runs_out_is_told_before_and_in_the_report_of_the_death(
    launch: Launch, limited: Path
) -> None:
    procs = limited / "cgroup.procs"
    job = launch(
        *("--nproc-per-node", "1", "--no-warm-start"),
        source=GREEDY,
        env={"CGROUP": str(limited)},
        preexec_fn=lambda: procs.write_text("0"),
    )
    said = eventually(lambda: re.search(r"ddp-launch: \S+: (memory use is high: .*)", job.stderr()))
    assert re.match(
        rf"memory use is high: (9\d|100) % of the cgroup's limit \(\d{{3}} of {LIMIT_MIB} MiB\)", said[1]
    ), said[1]
    (limited / "memory.oom_control").write_text("0")
    (job.there / "enough").touch()
    assert job.wait() == 137
    assert "out-of-memory killer" in job.stderr()
    assert re.search(
        rf"memory use was \d+ % of the cgroup's limit \(\d{{3}} of {LIMIT_MIB} MiB\) \d+ s before",
        job.stderr(),
    )
