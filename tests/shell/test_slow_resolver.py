"""A resolver that takes a minute: a signal to stop is answered at once all the same, and nothing is left."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest

from launcher import error_boundary
from launcher.exchange import AgentEvent, CheckpointSignal, StopRequested, Swept
from launcher.stop_requests import unless_stopped

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

STOP = StopRequested(15, "SIGTERM")
SLOW_S = 120
ANSWER_S = 30  # by a machine that has much else to do

# What a slow resolver is to a process, in every process of the command.
SLOW = f"""
import os, socket, time

def slowly(function):
    def look_up(host, *args, **options):
        if "slow" in os.environ["SLOW_NAMES"] + str(host) and not str(host)[:1].isdigit():
            open(os.path.join(os.environ["THERE"], "asked"), "w").close()
            time.sleep({SLOW_S})
        return function(host, *args, **options)
    return look_up

socket.getaddrinfo, socket.getfqdn = slowly(socket.getaddrinfo), slowly(socket.getfqdn)
"""


@pytest.mark.parametrize(
    ("words", "own_name"),
    [
        (("--nnodes", "2", "--rendezvous", "slow.example:29400"), ""),  # is it this host's own?
        (("--nnodes", "2"), "slow"),  # which name has this host?
        (("--master-addr", "slow.example"), ""),
        (("--hosts", "slow.example,slower.example"), ""),
    ],
)
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.nightly)])
def test_a_signal_is_answered_while_names_are_looked_up(
    launch: Launch, tmp_path: Path, words: tuple[str, ...], own_name: str, name: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SLOW)
    env = {"PYTHONPATH": str(tmp_path / "site"), "SLOW_NAMES": own_name}
    job = launch("--no-warm-start", "--preflight", "off", *words, source="", env=env)
    job.await_there("asked")
    began = time.monotonic()
    job.send(getattr(signal, name))
    assert job.wait(SLOW_S / 2) == 128 + getattr(signal, name)
    assert time.monotonic() - began < ANSWER_S
    assert name in job.stderr()
    job.assert_nothing_left()


# --- the parts ---------------------------------------------------------------------------------------


def queued(*facts: AgentEvent) -> asyncio.Queue[AgentEvent]:
    queue: asyncio.Queue[AgentEvent] = asyncio.Queue()
    for fact in facts:
        queue.put_nowait(fact)
    return queue


def left_in(queue: asyncio.Queue[AgentEvent]) -> list[AgentEvent]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.mark.parametrize("request_", [STOP, CheckpointSignal("SIGTERM", STOP)])
def test_work_gives_way_to_a_stop_and_the_facts_stay(request_: AgentEvent) -> None:
    async def main() -> None:
        facts = queued(Swept(1), request_)
        assert await unless_stopped(asyncio.sleep(600), facts) == STOP
        assert left_in(facts) == [Swept(1), request_]

    asyncio.run(main())


def test_work_that_is_done_is_not_stopped() -> None:
    async def main() -> None:
        facts = queued(Swept(1), CheckpointSignal("SIGUSR1", None))
        assert await unless_stopped(asyncio.sleep(0, "done"), facts) == "done"
        assert len(left_in(facts)) == 2
        with pytest.raises(ZeroDivisionError):
            await unless_stopped(asyncio.to_thread(divmod, 1, 0), facts)

    asyncio.run(main())


def test_a_loop_ends_without_its_blocked_threads() -> None:
    async def main() -> str:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, SLOW_S)
        return await asyncio.to_thread(str, 7)

    began = time.monotonic()
    assert error_boundary.run(main()) == "7"
    assert time.monotonic() - began < ANSWER_S
