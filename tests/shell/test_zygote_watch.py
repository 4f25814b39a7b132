"""A zygote is lost: the agent's event loop goes on while its processes are cleared away, and another one takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launched import FAMILY, SOON_S

from launcher.exchange import AgentEvent, StartFailed, ZygoteReplaced
from launcher.ranks.zygote import Zygote
from launcher.ranks.zygote_watch import ZygoteWatch
from launcher.template import messages
from launcher.template.messages import Ready, Report, Spawn, Started

if TYPE_CHECKING:
    from launched import Launch

RANK = Spawn(0, 1, ("true",), None, {}, (), True, False)


class Starter:
    """Clears away for as long as it is let, as where a process does not die."""

    def __init__(self) -> None:
        self.clears, self.may_end = threading.Event(), threading.Event()
        self.warm, self.obstacle = False, ""
        self.ends: list[socket.socket] = []

    def start(self) -> Zygote:
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        child = subprocess.Popen(["true"])
        child.returncode = 0  # the watch reaps it
        return Zygote(child.pid, ours, warm=False)

    def clean_up(self) -> None:
        self.clears.set()
        assert self.may_end.wait(SOON_S)


@pytest.mark.parametrize("was_ready", [True, False])
def test_the_loop_goes_on_while_a_lost_zygote_is_cleared_away(was_ready: bool) -> None:
    starter: Any = Starter()
    heard: list[Report] = []
    lost: list[str] = []
    facts: asyncio.Queue[AgentEvent] = asyncio.Queue()

    async def hear(report: Report) -> None:
        heard.append(report)

    async def main() -> AgentEvent:
        watch = ZygoteWatch(starter, starter.start(), lambda _line: None)
        running = asyncio.create_task(watch.run(hear, lost.append, facts.put_nowait))
        outbox = messages.Outbox(starter.ends[0])
        for report in (Ready(""), Started(0, 1, 7)) if was_ready else ():
            outbox.put(report)
        outbox.flush()
        starter.ends[0].close()
        assert await asyncio.to_thread(starter.clears.wait, SOON_S)
        assert facts.empty()
        read, write = os.pipe()
        watch.zygote.spawn(RANK, (write, os.dup(write)))  # is dropped, and what it would have written to ends
        assert os.read(read, 1) == b""
        os.close(read)
        starter.may_end.set()
        fact = await asyncio.wait_for(facts.get(), SOON_S)
        running.cancel()
        await asyncio.wait([running])
        watch.close()
        for end in starter.ends:
            end.close()
        return fact

    assert type(asyncio.run(main())) is (ZygoteReplaced if was_ready else StartFailed)
    assert heard == ([Ready(""), Started(0, 1, 7)] if was_ready else [])
    assert len(lost) == 1


def test_a_zygote_that_does_not_read_is_killed_after_its_ranks_were_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_READ_S", "_LOOK_AGAIN_S"):
        monkeypatch.setattr(f"launcher.ranks.zygote_watch.{name}", 0.05)
    blocked, rank = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    facts: asyncio.Queue[AgentEvent] = asyncio.Queue()
    lost: list[str] = []
    starter: Any = Starter()
    starter.may_end.set()
    ours, theirs = socket.socketpair()

    async def hear(_report: Report) -> None:
        facts.put_nowait(StartFailed("ready"))

    async def main() -> AgentEvent:
        watch = ZygoteWatch(starter, Zygote(blocked.pid, ours, warm=False), lambda _line: None)
        running = asyncio.create_task(watch.run(hear, lost.append, facts.put_nowait))
        outbox = messages.Outbox(theirs)
        outbox.put(Ready(""))
        outbox.flush()
        await asyncio.wait_for(facts.get(), SOON_S)
        watch.signal(signal.SIGTERM, (rank.pid,))
        assert await asyncio.to_thread(rank.wait, SOON_S) == -signal.SIGTERM
        assert blocked.poll() is None
        blocked.returncode = 0  # the watch reaps it
        watch.signal(signal.SIGKILL, ())
        fact = await asyncio.wait_for(facts.get(), SOON_S)
        running.cancel()
        await asyncio.wait([running])
        watch.close()
        for end in (theirs, *starter.ends):
            end.close()
        return fact

    assert type(asyncio.run(main())) is ZygoteReplaced
    assert len(lost) == 1


@pytest.mark.parametrize("warm", [True, False])
def test_a_stopped_zygote_does_not_keep_a_job_from_ending(launch: Launch, warm: bool) -> None:
    source = FAMILY + "there('rank')\nwhile True: signal.pause()\n"
    job = launch(*(() if warm else ("--no-warm-start",)), source=source, fake_torch="")
    job.await_there("rank-0")
    rank = int((job.there / "rank-0").read_text())
    os.kill(int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGSTOP)
    job.send(signal.SIGINT)
    assert job.wait() == 130, job.stderr()
    job.assert_nothing_left(0.0)
