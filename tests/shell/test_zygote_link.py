"""Agent and zygote: however much both have to say, neither waits for the other, and every descriptor finds its rank."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest
from launched import SOON_S

from launcher.ranks.zygote import Zygote
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.template import messages
from launcher.template.messages import Exited, Keep, Signal, Spawn, Started, SweepDone, SweepOrder
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANKS = 400


def spawn(local_rank: int, *argv: str) -> Spawn:
    return Spawn(local_rank, 1, argv, None, {"NAME": "é" * 200}, (), True, False, is_python=False)


@pytest.mark.parametrize(
    "message",
    [
        spawn(3, "true"),
        Spawn(0, 1, ("a",), ("b",), {}, (0, 2), False, True),
        Keep(1, "::1", 0),
        Signal(15, None),
        Signal(9, (1, 2)),
        SweepOrder(7),
        messages.Ready("why"),
        Started(1, 2, 3),
        Exited(1, 2, 3, None, 9, 7.5, told=15),
        messages.Keeping(1, 29400, True),
        messages.KeeperEnded(1, "killed by SIGKILL"),
        SweepDone(1, 0),
        messages.Signalled(15, 1),
        messages.Signalled(15, None),
    ],
)
def test_what_is_written_reads_the_same(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """With room for a few messages only."""
    agent, zygote = socket.socketpair()
    for end in (agent, zygote):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with agent, zygote:
        yield agent, zygote


def test_two_ends_with_much_to_say_do_not_wait_for_each_other(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, zygote = ends
    orders, reports = messages.Outbox(agent), messages.Outbox(zygote)
    for number in range(RANKS):
        read, write = os.pipe()
        os.write(write, str(number).encode())
        os.close(write)
        orders.put(spawn(number, "true"), (read,))
        orders.put(SweepOrder(number))
        reports.put(Started(number, 1, number))
    orders.flush()
    reports.flush()
    assert not orders.is_empty
    assert not reports.is_empty

    heard, obeyed = messages.Inbox(agent), messages.Inbox(zygote)
    spawned: list[int] = []
    started: list[int] = []
    while len(started) < RANKS or len(spawned) < RANKS:
        assert obeyed.receive()
        while (order := obeyed.take()) is not None:
            if isinstance(order.message, Spawn):
                (fd,) = order.fds
                spawned.append(order.message.local_rank)
                assert os.read(fd, 9) == str(order.message.local_rank).encode()
                os.close(fd)
            else:
                assert not order.fds
        assert heard.receive()
        while (report := heard.take()) is not None:
            assert isinstance(report.message, Started)
            started.append(report.message.pid)
        orders.flush()
        reports.flush()
    assert spawned == started == list(range(RANKS))


def test_descriptors_that_were_never_sent_or_taken_are_closed(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    agent, zygote = ends
    sent = tmp_path / "sent"
    sent.touch()
    outbox, inbox = messages.Outbox(agent), messages.Inbox(zygote)
    for number in range(RANKS):
        outbox.put(spawn(number, "true"), (os.open(sent, os.O_RDONLY),))
    outbox.flush()
    inbox.receive()
    assert open_here(sent) > 0  # the others are on their way
    outbox.close()
    inbox.close()
    assert open_here(sent) == 0


def open_here(path: Path) -> int:
    """Descriptors of this file alone: what else this process has open, other threads and the collector change."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return found


def test_the_end_of_the_other_is_seen(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, zygote = ends
    outbox, inbox = messages.Outbox(agent), messages.Inbox(agent)
    zygote.close()
    outbox.put(SweepOrder(1))
    with pytest.raises(OSError, match="Broken pipe"):
        outbox.flush()
    assert not inbox.receive()


# --- a real zygote -----------------------------------------------------------------------------------


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    spec = LaunchSpec(EntryPoint(EntryKind.PROGRAM, "true"), JobSpec("link"))
    started = Zygote.start(spec, dict(os.environ), cgroup="", scratch=str(tmp_path / "scratch"), warm=False)
    yield started
    started.close()
    os.waitpid(started.pid, 0)


def exits_of(zygote: Zygote, ranks: int) -> list[Exited]:
    """Writes and reads whenever the socket lets us, as the agent's event loop does."""
    exits: list[Exited] = []
    give_up_at = time.monotonic() + SOON_S
    while len(exits) < ranks:
        left_s = give_up_at - time.monotonic()
        unsent = [] if zygote.flush() else [zygote]
        readable, _, _ = select.select([zygote], unsent, [], max(0.0, left_s))
        assert left_s > 0, f"{len(exits)} of {ranks} ranks have ended"
        if readable:
            reports = zygote.read()
            assert reports is not None
            exits += [each for each in reports if isinstance(each, Exited)]
    return exits


@pytest.mark.nightly(instead="::test_two_ends_with_much_to_say_do_not_wait_for_each_other")
def test_hundreds_of_short_ranks_start_and_end(zygote: Zygote) -> None:
    for number in range(RANKS):
        zygote.spawn(
            spawn(number, "true"), (os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY))
        )
    exits = exits_of(zygote, RANKS)
    assert sorted(each.local_rank for each in exits) == list(range(RANKS))
    assert {each.exit_code for each in exits} == {0}


def test_a_rank_inherits_its_own_descriptors_only(zygote: Zygote) -> None:
    """Also when the orders for many come at once."""
    program = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    outputs = []
    for number in range(20):
        read, write = os.pipe()
        outputs.append(read)
        order = spawn(number, sys.executable, "-I", "-S", "-c", program)
        zygote.spawn(order, (write, os.open(os.devnull, os.O_WRONLY)))
    exits_of(zygote, 20)
    for output in outputs:
        assert os.read(output, 100) == b"[0, 1, 2]\n"
        os.close(output)


def test_nothing_waits_for_a_zygote_whose_link_is_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    zygote = Zygote(0, ends[0], warm=True)
    zygote.keep(1, "", 0)
    assert zygote.has_unread_orders
    zygote.close()
    assert not zygote.has_unread_orders
