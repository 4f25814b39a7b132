"""NCCL's own monitor (RAS): what an agent asks it, and what it takes from the answer."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from launched import Launched

from launcher.health import communication
from launcher.health.flight_recorder import MAX_FINDINGS, findings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
_WITHIN_S = 5.0


def rank(number: int, all_reduces: int = 7, error: int = 0, pid: int | None = None) -> dict[str, Any]:
    """In the format of NCCL 2.28."""
    return {
        "rank": number,
        "host": f"node-{number // 2}",
        "pid": 100 + number if pid is None else pid,
        "cuda_dev": number % 2,
        "nvml_dev": number % 2,
        "status": {
            "init_state": 0,
            "async_error": error,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        },
        "collective_counts": {name: all_reduces * (name == "AllReduce") for name in _FUNCTIONS},
    }


def missing(number: int, *, dead: bool) -> dict[str, Any]:
    return {
        "rank": number,
        "host": f"node-{number // 2}",
        "pid": 100 + number,
        "cuda_dev": number % 2,
        "nvml_dev": number % 2,
        "status": {"unresponsive": not dead, "considered_dead": dead},
    }


def answer(*ranks: dict[str, Any], lacks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    communicator = {
        "hash": "0x1",
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(lacks),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lacks),
        "ranks": list(ranks),
        "missing_ranks": list(lacks),
    }
    return {
        "nccl_version": "2.28.3",
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }


OURS = (100, 101)


def test_who_is_behind() -> None:
    (found,) = findings(answer(rank(0), rank(1, all_reduces=6), rank(2), rank(3)), OURS)
    assert found == (
        "communicator of 4 ranks: rank 1 (pid 101 on node-0) has called AllReduce 6 times, most ranks 7 times"
    )


@pytest.mark.parametrize(("dead", "what"), [(True, "is dead"), (False, "does not respond")])
def test_who_is_silent(dead: bool, what: str) -> None:
    (found,) = findings(answer(rank(0), rank(1), rank(2), lacks=(missing(3, dead=dead),)), OURS)
    assert found == f"communicator of 4 ranks: rank 3 (pid 103 on node-1) {what}"


def test_errors() -> None:
    found = findings(answer(rank(0, error=6), rank(1, error=6), rank(2, error=2), rank(3, error=7)), OURS)
    assert found == (
        "communicator of 4 ranks: asynchronous error on rank 2 (pid 102 on node-1): a system call failed",
        "communicator of 4 ranks: asynchronous error on ranks 0 (pid 100 on node-0), 1 (pid 101 on node-0): a peer "
        "failed",
    )


def test_nothing_is_said_of_a_sound_job_and_of_the_job_of_somebody_else() -> None:
    assert findings(answer(rank(0), rank(1)), OURS) == ()
    assert findings(answer(rank(0, pid=1), rank(1, all_reduces=6, pid=2)), OURS) == ()


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"communicators": 1},
        {"communicators": [1, {"ranks": 1}, {"ranks": [1]}]},
        answer({"pid": 100}, {"pid": 101, "status": 3, "collective_counts": {"AllReduce": "x"}}),
        answer({"pid": 100, "rank": 1 << 80, "host": ["x"], "status": {"async_error": 1e300}}),
    ],
)
def test_answers_that_are_none_break_nothing(plain: object) -> None:
    assert all(isinstance(each, str) for each in findings(plain, OURS))


def test_the_answer_of_a_large_job_is_cut() -> None:
    ranks = [rank(number, all_reduces=number) for number in range(200)]
    assert len(findings(answer(*ranks), OURS)) == MAX_FINDINGS


# --- the conversation ----------------------------------------------------------------------------------


async def served(reply: Callable[[bytes], bytes]) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(reply(line))
            if line in (b"STATUS\n", b"VERBOSE STATUS\n"):
                break
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def as_2_28(line: bytes) -> bytes:
    if line.startswith(b"CLIENT PROTOCOL"):
        return b"SERVER PROTOCOL 2\n"
    return json.dumps(answer(rank(0))).encode() if line == b"STATUS\n" else b"OK\n"


def as_2_24(line: bytes) -> bytes:
    return b"ERROR: Unknown command\n" if line.startswith(b"SET FORMAT") else as_2_28(line)


@pytest.mark.parametrize(
    ("reply", "is_known"),
    [(as_2_28, True), (as_2_24, False), (lambda _line: b"", False), (lambda _line: b"OK\n", False)],
)
def test_what_is_asked(reply: Callable[[bytes], bytes], is_known: bool) -> None:
    async def ask() -> object:
        async with await served(reply) as server:
            return await communication.ask(
                server.sockets[0].getsockname()[:2], _WITHIN_S if is_known else 0.2
            )

    found = asyncio.run(ask())
    assert found == (answer(rank(0)) if is_known else None)


def test_nobody_answers() -> None:
    assert asyncio.run(communication.ask(("127.0.0.1", 1), _WITHIN_S)) is None


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({}, ("localhost", 28028)),
        ({"NCCL_RAS_ADDR": "10.0.0.1:5"}, ("10.0.0.1", 5)),
        ({"NCCL_RAS_ADDR": "[::1]:5"}, ("::1", 5)),
        ({"NCCL_RAS_ADDR": "host:many"}, None),
        ({"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_where_it_listens(environ: dict[str, str], where: tuple[str, int] | None) -> None:
    assert communication.address(environ) == where


# --- a job ---------------------------------------------------------------------------------------------

STUCK = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
path = os.path.join(os.environ["THERE"], f"pid-{rank}")
open(path + ".part", "w").write(str(os.getpid()))
os.rename(path + ".part", path)
for step in range(20):
    dist.all_reduce(torch.zeros(1))
    if step == 10 and rank == 1:
        time.sleep(1000)
"""


def test_a_verdict_holds_what_nccls_monitor_knows(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()

    def of_this_job(line: bytes) -> bytes:
        if line != b"STATUS\n":
            return as_2_28(line)
        pids = [int((tmp_path / f"pid-{number}").read_text()) for number in (0, 1)]
        return json.dumps(answer(rank(0, pid=pids[0]), rank(1, 6, pid=pids[1]), rank(2))).encode()

    server = loop.run_until_complete(served(of_this_job))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        env = {"THERE": str(tmp_path), "NCCL_RAS_ADDR": address}
        words = ("--nproc-per-node", "2", "--hang-timeout", "1,start=60,first-step=4")
        job = Launched(tmp_path / "job", *words, source=STUCK, env=env)
        assert job.wait() != 0
        said = job.failure()["first_cause"]["traceback"]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
    assert "NCCL's own monitor (RAS), all nodes:\n" in said
    assert "has called AllReduce 6 times, most ranks 7 times" in said
