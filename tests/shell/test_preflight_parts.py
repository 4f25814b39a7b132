"""What the pre-flight gathers, from real files, sockets and servers."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from ddp_launch_wings.links import network_check
from launcher import error_boundary
from launcher.preflight import agent_preflight, installed
from launcher.preflight.checkup import GB, Check, Clock, Grade, judge_clock
from rendezvous.client.credential_files import ClientOptions
from rendezvous.client.remote_session import CallFailed, Scratch, clock_offset
from rendezvous.service.server import SERVING
from rendezvous.values.contracts import TIME_METADATA

if TYPE_CHECKING:
    from pathlib import Path

SEND_S = 0.05


# --- one link ------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Any:
    listening = network_check.ProbeListener("127.0.0.1")
    yield listening
    listening.close()


def of(listener: network_check.ProbeListener, token: str = "") -> network_check.ProbedNode:
    return network_check.ProbedNode("127.0.0.1", listener.port, token or listener.token)


def test_both_sides_measure_what_comes_in(listener: network_check.ProbeListener) -> None:
    with ThreadPoolExecutor() as aside:
        there = aside.submit(network_check.connect, of(listener), 3, 7, "127.0.0.1", 60.0, SEND_S)
        heard = network_check.answer(listener.take(3, 7, 60.0), 60.0, SEND_S)
        back = there.result(100)
    assert (heard.problem, back.problem) == ("", "")
    assert heard.in_bps is not None
    assert back.in_bps is not None
    assert min(heard.in_bps, back.in_bps) > 1e4  # a block or two, if either side was held up meanwhile
    assert back.rtt_s is not None
    assert 0.0 < back.rtt_s < 60.0


def test_unauthenticated_peers_are_rejected_and_missing_peers_time_out(
    listener: network_check.ProbeListener,
) -> None:
    told = network_check.connect(of(listener, "0" * 32), 3, 7, "", 5.0, SEND_S)
    assert told.problem
    assert told.in_bps is None
    assert listener.take(3, 7, 0.05) is None
    assert "within 0.05 s" in network_check.answer(None, 0.05, SEND_S).problem


def test_nobody_listening_is_told_with_the_address(listener: network_check.ProbeListener) -> None:
    peer = of(listener)
    listener.close()
    told = network_check.connect(peer, 3, 7, "", 5.0, SEND_S)
    assert f"127.0.0.1:{peer.port} (connection refused)" in told.problem


# --- the machine ---------------------------------------------------------------------------------------


def laid_out(root: Path, **files: str) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_the_tightest_control_group_counts_without_what_it_can_give_back(tmp_path: Path) -> None:
    meminfo = "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n"
    version_2 = laid_out(
        tmp_path / "v2",
        **{
            "proc/meminfo": meminfo,
            "proc/self/cgroup": "0::/jobs/mine\n",
            "proc/self/mountinfo": "3 1 0:6 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
            "sys/fs/cgroup/jobs/cgroup.procs": "",
            "sys/fs/cgroup/jobs/memory.max": str(8 * GB),
            "sys/fs/cgroup/jobs/memory.current": str(6 * GB),
            "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {2 * GB}\n",
            "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
            "sys/fs/cgroup/jobs/mine/memory.current": "12\n",
        },
    )
    found = agent_preflight.memory(version_2)
    assert (found.total, found.available, found.limit, found.used) == (64 * GB, 60 * GB, 8 * GB, 4 * GB)
    version_1 = laid_out(
        tmp_path / "v1",
        **{
            "proc/meminfo": meminfo,
            "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/abc\n",
            "proc/self/mountinfo": "3 1 0:6 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/cgroup.procs": "",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GB),
        },
    )
    assert (agent_preflight.memory(version_1).limit, agent_preflight.memory(version_1).used) == (2 * GB, GB)


def test_versions_are_read_without_importing_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out(
        tmp_path,
        **{
            "torch/__init__.py": "raise RuntimeError('imported')",
            "torch/version.py": "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n",
            "nvidia_nccl_cu12-2.27.5.dist-info/METADATA": "",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installed.versions()
    assert (found.torch, found.cuda, found.nccl) == ("2.9.1+cu128", "12.8", "2.27.5")
    assert installed.versions("/usr/bin/env").torch == ""  # another Python, of which nothing is known


def test_a_part_that_hangs_costs_its_answer_and_nobody_the_time() -> None:
    never = threading.Event()

    def hang() -> tuple[Check, ...]:
        never.wait()
        return ()

    def broken() -> tuple[Check, ...]:
        raise ValueError("odd")

    began = time.monotonic()
    (late,) = error_boundary.run(agent_preflight._bounded("disk", hang, 0.05))
    assert time.monotonic() - began < 60.0  # the loop ends with the thread still there
    assert (late.grade, late.found) == (Grade.WARN, "no answer within 0.05 s")
    (odd,) = error_boundary.run(agent_preflight._bounded("disk", broken, 5.0))
    assert (odd.grade, odd.found) == (Grade.SKIPPED, "could not be checked (ValueError: odd)")
    never.set()


def test_a_process_that_was_held_up_itself_blames_no_disk() -> None:
    """As by a machine that was suspended: the time is up before anything could answer."""
    goes_on = threading.Event()

    def part() -> tuple[Check, ...]:
        goes_on.wait()
        return (agent_preflight.skipped("disk", "not now"),)

    def held_up() -> None:
        time.sleep(1.2)
        goes_on.set()

    async def story() -> tuple[Check, ...]:
        asyncio.get_running_loop().call_soon(held_up)
        return await agent_preflight._bounded("disk", part, 1.0)

    (found,) = asyncio.run(story())
    assert found.grade is Grade.SKIPPED


# --- the service ---------------------------------------------------------------------------------------


async def with_clock(ahead_s: float | None) -> tuple[float, float] | None:
    """What an agent finds out about a service whose clock is so far ahead; None: it does not tell its time."""

    async def check(_: bytes, context: Any) -> bytes:
        if ahead_s is not None:
            await context.send_initial_metadata(((TIME_METADATA, f"{time.time() + ahead_s:.6f}"),))
        return SERVING

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await clock_offset(f"127.0.0.1:{port}", ClientOptions())
    finally:
        await server.stop(None)


@pytest.mark.parametrize("ahead_s", [30.0, 0.0, -30.0])
def test_a_clock_that_is_off_is_found_within_the_bound(ahead_s: float) -> None:
    found = asyncio.run(with_clock(ahead_s))
    assert found is not None
    offset_s, within_s = found
    assert abs(offset_s - ahead_s) <= within_s + 1e-3  # the text that carries it is cut to a microsecond
    assert judge_clock(Clock(offset_s, within_s)).grade is (Grade.WARN if ahead_s else Grade.OK)


def test_an_older_service_that_does_not_tell_its_time_is_no_error() -> None:
    assert asyncio.run(with_clock(None)) is None


def test_a_scratchpad_that_nobody_serves_is_given_up_in_time(listener: network_check.ProbeListener) -> None:
    async def story() -> None:
        scratch = Scratch((f"127.0.0.1:{listener.port}",), ClientOptions(), "job")
        listener.close()
        try:
            await asyncio.wait_for(scratch.put("key", b"value", 0.5), 60)
        finally:
            await scratch.close()

    with pytest.raises(CallFailed):
        asyncio.run(story())
