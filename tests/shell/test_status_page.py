"""The page of a rank: both writers, whoever may not write, and what unchanged scripts leave on it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest
from launched import SOON_S, eventually
from written_page import ROOT, written

from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from launcher.health.pages import Pages
    from rendezvous.values.rank_view import RankView


def writing(pages: Pages, program: str) -> RankView:
    head = "import os, sys\nfrom ddp.telemetry import status_page\npage = status_page.page()\n"
    return written(pages, head, program)


def test_what_is_written_is_read(pages: Pages) -> None:
    program = """
    page.phase(status_page.DATA)
    page.phase(status_page.FORWARD)
    group = page.group("mesh_dp", 4, "0-6/2")
    for n in range(20):
        page.leave(page.enter(group, "all_reduce", "float32", 10 * n, n, -1, n % 2, 0))
    page.enter(group, "send", "int64", 3, 9, 2, 1, 7)
    page.buckets(7, 3, 2)
    page.group_timeout(7200.0)
    page.group_timeout(60.0)
    page.step()
    page.step()  # a second optimizer, in the same step
    page.phase(status_page.FORWARD)
    page.step()
    page.section("über" * 40, 1.5, 0)
    page.message("hello")
    page.error("x" * 1000)
    page.phase(status_page.BACKWARD)
    """
    view = writing(pages, program)
    assert (view.rank, view.known, view.phase, view.step) == (5, True, RankPhase.BACKWARD, 2)
    assert view.last_step_s > 0
    assert view.mean_step_s == view.last_step_s  # of the first step it is told nothing
    assert {phase for phase, _ in view.phase_times} >= {RankPhase.DATA, RankPhase.FORWARD}
    assert len(view.collectives) == 16
    last, send = view.collectives[-2:]
    assert (last.number, last.seq, last.op, last.dtype, last.numel) == (20, 20, "all_reduce", "float32", 190)
    assert (last.group, last.shape, last.peer, last.is_async) == ("mesh_dp", 19, -1, True)
    assert (send.op, send.seq, send.peer, send.finished_s) == ("send", 7, 2, None)
    assert view.waiting_in == (send,)
    (group,) = view.groups
    assert (group.name, group.size, group.members) == ("mesh_dp", 4, "0-6/2")
    assert (group.entered, group.finished) == (20, 20)
    assert view.buckets is not None
    assert (view.buckets.of, view.buckets.launched, view.buckets.finished) == (7, 3, 2)
    assert view.group_timeout_s == 7200.0
    assert view.section is not None
    assert (view.section.name, view.section.timeout_s) == ("über" * 20 + "übe", 1.5)
    assert (view.message, view.error) == ("hello", "x" * 368)
    assert not view.process.alive


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_the_timeout_of_a_section_is_a_time(timeout: float) -> None:
    from ddp import section

    with pytest.raises(ValueError, match="timeout"), section("eval", timeout=timeout):
        pass


def test_marks_leave_alone_what_the_script_has_named(pages: Pages) -> None:
    program = """
    from ddp import section, status
    assert page.mark(status_page.COMMUNICATE) == status_page.STARTING
    assert page.phase(status_page.IDLE) == status_page.STARTING  # to wait does not end the start
    with section("eval", timeout=600):
        before = page.mark(status_page.FORWARD)
        page.back(before)
        with section("plots"):
            pass
        status("going", step=100)
        os._exit(0)
    """
    view = writing(pages, program)
    assert (view.phase, view.message, view.step) == (RankPhase.EVALUATION, "going", 100)
    assert view.section is not None
    assert (view.section.name, view.section.timeout_s) == ("eval", 600.0)


def test_only_the_rank_itself_writes(pages: Pages) -> None:
    program = """
    import subprocess
    page.message("the rank")
    tool = "from ddp.telemetry import status_page as s; s.page().message('a tool'); assert not s.is_read()"
    subprocess.run([sys.executable, "-c", tool], check=True)
    child = os.fork()
    if not child:
        page.message("a child")
        os._exit(0)
    os.waitpid(child, 0)
    """
    assert writing(pages, program).message == "the rank"


ONLY_EXIT = """
import ctypes, platform, struct

def only_exit():
    number = {"x86_64": 231, "aarch64": 94}[platform.machine()]
    load, equal, give, allow, kill = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
    steps = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, allow), (give, 0, 0, kill)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    no_new_rights, set_filter = 38, 22
    assert prctl(no_new_rights, 1, 0, 0, 0) == 0
    assert prctl(set_filter, 2, program, 0, 0) == 0
"""


def test_a_write_makes_no_system_call(pages: Pages) -> None:
    """In a process that may do nothing but exit, and is killed for anything else."""
    program = """
    group = page.group("0", 2, "0-1")
    only_exit()
    for n in range(1000):
        page.phase(1)
        page.leave(page.enter(group, "all_reduce", "float32", n, n, -1, 0, 0))
        page.step()
        page.message("on")
    page.message("done")
    os._exit(0)
    """
    assert writing(pages, ONLY_EXIT + textwrap.dedent(program)).message == "done"


def test_a_reader_beside_a_writer_sees_whole_blocks(pages: Pages) -> None:
    program = """
    group = page.group("0", 2, "0-1")
    n = 0
    while True:
        n += 1
        page.message(f"{n} " * 20)
        page.leave(page.enter(group, "all_reduce", "float32", n, n, -1, 0, 0))
    """
    env = dict(os.environ) | pages.open(0, 5)
    code = f"from ddp.telemetry import status_page\npage = status_page.page()\n{textwrap.dedent(program)}"
    with subprocess.Popen([sys.executable, "-c", code], env=env, cwd=ROOT) as writer:
        try:
            pages.started(0, writer.pid)
            eventually(lambda: seen(pages).message)
            words, until = set[str](), time.monotonic() + 2.0
            while time.monotonic() < until or len(words) <= 20:
                words |= a_whole_look(pages)
                assert time.monotonic() < until + SOON_S, words
            assert writer.poll() is None
        finally:
            writer.kill()


def a_whole_look(pages: Pages) -> set[str]:
    """The words of the message: one and the same, or none."""
    view = seen(pages)
    words = set(view.message.split())
    assert len(words) <= 1, "a mix of two messages"
    assert all(one.numel == one.number == one.shape for one in view.collectives)
    return words


def test_how_long_a_group_waits_is_known_while_it_is_formed(pages: Pages) -> None:
    program = """
    import datetime
    import torch.distributed as dist
    from ddp.telemetry import torch_marks
    torch_marks.install()
    hours = datetime.timedelta(hours=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=hours)
    """
    env = dict(os.environ) | pages.open(0, 5)
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env=env, cwd=ROOT) as alone:
        try:
            eventually(lambda: seen(pages).group_timeout_s == 7200.0)
            assert seen(pages).phase is RankPhase.STARTING
            assert not seen(pages).groups
        finally:
            alone.kill()


def seen(pages: Pages) -> RankView:
    view = pages.view(0)
    assert view is not None
    return view


# --- unchanged scripts -------------------------------------------------------------------------------
