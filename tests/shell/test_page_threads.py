"""Several threads write the page of a rank: it shows the one that trains, and counts what all of them do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from written_page import written

from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from launcher.health.pages import Pages
    from rendezvous.values.rank_view import RankView


HEAD = """
import os, sys, threading
from ddp.telemetry import status_page as s
page = s.page()

def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def after(pages: Pages, program: str) -> RankView:
    return written(pages, HEAD, program)


def test_checkpoints_of_threads_that_overlap_leave_the_phase_alone(pages: Pages) -> None:
    program = """
    begun, end = threading.Event(), threading.Event()
    page.phase(s.IDLE)

    def save():
        before = page.phase(s.CHECKPOINT)
        begun.set()
        end.wait()
        page.phase(before)

    first = threading.Thread(target=save)
    first.start()
    begun.wait()
    before = page.phase(s.CHECKPOINT)  # begins after the other one, and ends before it
    page.phase(before)
    page.mark(s.FORWARD)
    end.set()
    first.join()
    os._exit(0)
    """
    view = after(pages, program)
    assert view.phase is RankPhase.FORWARD
    assert view.totals.checkpoints == 2


def test_a_save_in_the_background_does_not_hide_the_training(pages: Pages) -> None:
    program = """
    page.mark(s.BACKWARD)
    page.mark(s.OPTIMIZER)
    page.step()
    begun = threading.Event()

    def save():
        page.phase(s.CHECKPOINT)
        begun.set()
        threading.Event().wait()

    threading.Thread(target=save, daemon=True).start()
    begun.wait()
    page.mark(s.BACKWARD)
    page.mark(s.OPTIMIZER)
    page.step()
    os._exit(0)
    """
    view = after(pages, program)
    assert (view.phase, view.step) == (RankPhase.OPTIMIZER, 2)
    assert RankPhase.CHECKPOINT not in dict(view.phase_times)


def test_a_thread_that_trains_while_the_main_one_does_not_is_shown(pages: Pages) -> None:
    program = """
    from ddp.telemetry.sections import section
    page.phase(s.IDLE)

    def train():
        page.mark(s.FORWARD)
        page.back(s.IDLE)
        before = page.mark(s.BACKWARD)
        page.back(before)
        page.mark(s.OPTIMIZER)
        page.step()

    in_thread(train)
    in_thread(train)  # the first one has ended
    with section("of the main thread", timeout=5):
        page.mark(s.DATA)
        last = threading.Thread(target=lambda: (train(), os._exit(0)))
        last.start()
        last.join()
    """
    view = after(pages, program)
    assert (view.phase, view.step) == (RankPhase.OPTIMIZER, 3)
    assert view.section is None


def test_another_model_in_the_background_changes_nothing(pages: Pages) -> None:
    program = """
    def train():
        for phase in (s.DATA, s.FORWARD, s.BACKWARD, s.OPTIMIZER):
            page.mark(phase)
        page.step()

    page.phase(s.IDLE)
    in_thread(train)  # before the main thread does
    train()
    for _ in range(3):
        in_thread(train)
    page.mark(s.EXITING)
    os._exit(0)
    """
    view = after(pages, program)
    assert (view.phase, view.step) == (RankPhase.EXITING, 2)


def test_a_thread_that_only_calls_the_optimizer_counts_steps(pages: Pages) -> None:
    program = """
    page.phase(s.IDLE)
    for _ in range(3):
        page.back(page.mark(s.BACKWARD))
        in_thread(lambda: (page.mark(s.OPTIMIZER), page.step(), page.mark(s.IDLE)))
    os._exit(0)
    """
    view = after(pages, program)
    assert (view.phase, view.step) == (RankPhase.IDLE, 3)


def test_no_write_of_many_threads_is_lost(pages: Pages) -> None:
    program = """
    sys.setswitchinterval(1e-6)
    groups = [page.group(str(n), 2, "0-1") for n in range(8)]

    def communicate(group):
        for n in range(400):
            before = page.mark(s.COMMUNICATE)
            page.leave(page.enter(group, "all_reduce", "float32", n, n, -1, n % 2, 0))
            page.back(before)
            page.phase(page.phase(s.CHECKPOINT))

    page.phase(s.IDLE)
    threads = [threading.Thread(target=communicate, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)
    """
    view = after(pages, program)
    assert [(group.entered, group.finished) for group in view.groups] == [(400, 400)] * 8
    assert view.phase is RankPhase.IDLE
    assert view.totals.checkpoints == 3200


def test_collectives_that_end_after_many_others_have_begun_are_counted(pages: Pages) -> None:
    program = """
    group = page.group("0", 2, "0-1")
    tickets = [page.enter(group, "all_reduce", "float32", n, n, -1, 1, 0) for n in range(40)]
    send = page.enter(group, "send", "float32", 1, 1, 1, 1, 7)
    for ticket in (*tickets, send):
        page.leave(ticket)
    page.leave(send)
    os._exit(0)
    """
    (group,) = after(pages, program).groups
    assert (group.entered, group.finished) == (40, 40)


def test_groups_beyond_those_that_a_page_can_count_change_no_other(pages: Pages) -> None:
    program = """
    groups = [page.group(str(n), 2, "0-1") for n in range(4100)]
    for group in (*groups[4090:], groups[5]):
        page.leave(page.enter(group, "all_reduce", "float32", 1, 1, -1, 0, 0))
    os._exit(0)
    """
    view = after(pages, program)
    counts = {group.name: (group.entered, group.finished) for group in view.groups}
    assert counts == {str(n): (1, 1) for n in (5, *range(4090, 4096))}
