"""What the page of a rank adds up: what time counts as, steps and collectives by duration, repeated steps."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest
from written_page import written

from rendezvous.values.rank_view import NO_REPEAT, RankPhase, Repeat

if TYPE_CHECKING:
    from launcher.health.pages import Pages
    from rendezvous.values.rank_view import RankView

HEAD = """
import os, time
from ddp.telemetry import status_page as s
page = s.page()
def spend(phase, seconds):
    page.mark(phase)
    time.sleep(seconds)
"""


def after(pages: Pages, program: str, repeat: Repeat = NO_REPEAT, exit_code: int = 0) -> RankView:
    return written(pages, HEAD, program, repeat, exit_code)


def test_every_nanosecond_counts_as_one_phase(pages: Pages) -> None:
    program = """
    for _ in range(300):
        for phase in (s.DATA, s.IDLE, s.FORWARD, s.IDLE, s.BACKWARD, s.COMMUNICATE, s.IDLE, s.OPTIMIZER):
            page.mark(phase)
        page.step()
        page.evaluates(True)
        page.mark(s.FORWARD)
        page.evaluates(False)
        page.phase(s.CHECKPOINT)
        page.phase(s.IDLE)
    """
    view = after(pages, program)
    assert sum(seconds for _, seconds in view.phase_times) == pytest.approx(view.totals.open_s, abs=2e-9)
    assert (view.totals.checkpoints, view.totals.checkpoint_step) == (300, 300)


def test_what_time_counts_as(pages: Pages) -> None:
    """A forward pass without gradients is an evaluation, and what precedes a backward pass is a forward pass."""
    program = """
    page.phase(s.IDLE)
    spend(s.DATA, 0.02)
    spend(s.IDLE, 0.05)     # of a model that is not wrapped
    spend(s.BACKWARD, 0.02)
    page.mark(s.IDLE)
    page.evaluates(True)
    spend(s.DATA, 0.03)
    spend(s.FORWARD, 0.03)
    spend(s.IDLE, 0.03)     # the metrics
    spend(s.COMMUNICATE, 0.03)
    page.mark(s.IDLE)
    page.evaluates(False)
    spend(s.IDLE, 0.04)
    spend(s.OPTIMIZER, 0.02)
    page.phase(s.CHECKPOINT)
    page.phase(s.IDLE)
    spend(s.IDLE, 0.04)     # not in a step
    spend(s.BACKWARD, 0)
    os._exit(0)
    """
    view = after(pages, program)
    spent = dict(view.phase_times)
    assert view.phase is RankPhase.BACKWARD
    assert spent[RankPhase.EVALUATION] >= 0.12
    assert spent[RankPhase.FORWARD] >= 0.05
    assert spent[RankPhase.IDLE] >= 0.08
    assert spent[RankPhase.DATA] >= 0.02
    assert RankPhase.COMMUNICATE not in spent


def test_an_evaluation_shows_the_phase_that_the_rank_is_in(pages: Pages) -> None:
    program = """
    page.phase(s.IDLE)
    page.evaluates(True)
    spend(s.FORWARD, 0.02)
    os._exit(0)
    """
    view = after(pages, program)
    assert view.phase is RankPhase.FORWARD  # a hang is told from the phase
    assert dict(view.phase_times)[RankPhase.EVALUATION] >= 0.02
    assert RankPhase.FORWARD not in dict(view.phase_times)


def test_communication_behind_computation(pages: Pages) -> None:
    """While an asynchronous collective runs and the rank does not wait; several at the same time count once."""
    program = """
    def begin(is_async=1):
        return page.enter(group, "all_reduce", "float32", 1, 1, -1, is_async, 0)
    group = page.group("0", 2, "0-1")
    page.phase(s.FORWARD)
    spend(s.BACKWARD, 0.5)      # nothing runs
    began = time.monotonic()
    first = begin()
    time.sleep(0.02)
    second = begin()
    time.sleep(0.02)            # 40 ms are hidden
    before = page.mark(s.COMMUNICATE)
    at_most = time.monotonic() - began
    time.sleep(0.5)             # exposed
    began = time.monotonic()
    page.back(before)
    page.leave(first)
    time.sleep(0.02)            # 60 ms
    page.awaits()
    at_most += time.monotonic() - began
    time.sleep(0.5)             # exposed, in the backward pass of torch's own class
    page.leave(second)
    page.mark(s.OPTIMIZER)
    waits = begin(is_async=0)
    time.sleep(0.5)
    page.leave(waits)
    began = time.monotonic()
    begin()
    page.forget()               # its group is gone
    at_most += time.monotonic() - began
    time.sleep(0.5)
    began = time.monotonic()
    lost = begin()
    for _ in range(16):         # it leaves the ring
        page.leave(begin(0))
    at_most += time.monotonic() - began
    time.sleep(0.5)
    page.leave(lost)
    page.mark(s.IDLE)
    page.message(str(at_most))
    """
    view = after(pages, program)
    assert 0.06 <= view.totals.hidden_s <= float(view.message)


def test_steps_and_collectives_by_duration(pages: Pages) -> None:
    program = """
    group = page.group("0", 2, "0-1")
    for _ in range(7):
        ticket = page.enter(group, "all_reduce", "float32", 1, 1, -1, 0, 0)
        time.sleep(0.002)
        page.leave(ticket)
        page.leave(ticket)
        page.step()
    page.total(40)
    """
    totals = after(pages, program).totals
    steps, calls = totals.steps, totals.calls
    assert (sum(steps.bins), sum(calls.bins), len(steps.bins)) == (
        6,
        7,
        24,
    )  # the first step compiles and warms up
    assert calls.limits_s[7] == pytest.approx(0.002)
    assert sum(calls.bins[:8]) == 0  # none up to 2 ms
    assert 0.014 <= calls.sum_s < 60
    assert steps.sum_s >= 0.012
    assert totals.formed_s is not None
    assert totals.first_step_s is not None
    assert totals.formed_s > totals.first_step_s
    assert totals.total_steps == 40


@pytest.mark.parametrize(
    ("ending", "exit_code", "uncaught"),
    [
        ("raise ValueError('bad batch')", 1, True),
        ("sys.excepthook = print; raise ValueError('bad batch')", 1, True),
        ("sys.exit('no checkpoint found')", 1, False),
        ("pass", 0, False),
    ],
)
def test_whether_nothing_has_caught_the_last_exception(
    pages: Pages, ending: str, exit_code: int, uncaught: bool
) -> None:
    program = f"""
    import atexit, sys, traceback
    atexit.register(page.phase, s.EXITING)
    try:
        raise KeyError("handled")
    except KeyError:
        traceback.print_exc()
    {ending}
    """
    view = after(pages, program, exit_code=exit_code)
    assert (view.phase, view.totals.uncaught) == (RankPhase.EXITING, uncaught)


def test_lost_steps_that_are_repeated(pages: Pages) -> None:
    steps = """
    page.phase(s.IDLE)
    for n in range(4):
        spend(s.FORWARD, 0.02)
        page.mark(s.OPTIMIZER)
        page.step()
    """
    repeats = after(pages, steps, Repeat(steps=9)).totals
    assert repeats.repeats
    assert not repeats.repeated
    done = after(pages, steps, Repeat(steps=3)).totals
    assert not done.repeats
    assert dict(done.repeated)[RankPhase.FORWARD] >= 0.06
    whole = dict(after(pages, steps).phase_times)[RankPhase.FORWARD]
    assert whole >= 0.08
    assert RankPhase.STARTING not in dict(done.repeated)
    assert not after(pages, steps).totals.repeats
    numbered = "page.number(100)\n" + textwrap.dedent(steps)
    assert after(pages, numbered, Repeat(1, 105)).totals.repeats
    over = after(pages, numbered, Repeat(1, 104)).totals
    assert (over.repeats, over.numbers_steps) == (False, True)
    after_each = textwrap.dedent(steps).replace("page.step()", "page.step(); page.number(101 + n)")
    assert after(pages, after_each, Repeat(0, 105)).totals.repeats
    assert not after(pages, after_each, Repeat(0, 104)).totals.repeats
    assert not after(pages, steps, Repeat(0, 4)).totals.repeats  # an edited script that has no numbers


def test_steps_that_a_paused_process_takes_again(pages: Pages) -> None:
    """The agent's numbers are those of the start of the process. They do not count any more."""
    program = """
    page.phase(s.IDLE)
    began = time.monotonic()
    def step(seconds):
        spend(s.FORWARD, seconds)
        page.mark(s.OPTIMIZER)
        page.step()
    for n in range(3):
        step(0.02)
    page.number(50)
    page.repeats(2)
    step(0.03)
    if MORE:
        page.number(49)  # the script goes back to its last commit
        step(0.03)
        page.message(str(time.monotonic() - began))
        step(0.5)
    """
    during = after(pages, f"MORE = False\n{textwrap.dedent(program)}", Repeat(1, 20)).totals
    assert during.repeats
    view = after(pages, f"MORE = True\n{textwrap.dedent(program)}", Repeat(1, 20))
    assert not view.totals.repeats
    assert 0.12 <= dict(view.totals.repeated)[RankPhase.FORWARD] <= float(view.message)


def test_a_process_that_continues_starts_anew_until_its_next_step(pages: Pages) -> None:
    """It waits for the ranks that were started for it. That is no repeated step, and no communication of one."""
    program = """
    from types import SimpleNamespace
    from ddp.elastic import state
    from ddp.groups import reform
    from ddp.telemetry import guard
    order = SimpleNamespace(environment={})
    ignored = lambda *_: None
    watcher = SimpleNamespace(heals=ignored, go_on=ignored, will_pause=lambda s: True, park=lambda: order)
    guard.start = lambda: watcher
    reform.reform = lambda: spend(s.COMMUNICATE, 0.3)
    attempts = []

    def attempt():
        attempts.append("")
        if len(attempts) == 2:
            page.repeats(1)
        spend(s.FORWARD, 0.02)
        page.mark(s.COMMUNICATE)
        if len(attempts) == 1:
            raise RuntimeError("Connection closed by peer")
        page.mark(s.OPTIMIZER)
        page.step()

    state.run_healing(attempt)
    """
    view = after(pages, program)
    times = dict(view.phase_times)
    assert times[RankPhase.STARTING] >= 0.3
    assert times[RankPhase.COMMUNICATE] < 0.3
    assert not view.totals.repeats


def test_the_end_of_a_backward_pass_that_waits(pages: Pages) -> None:
    program = """
    page.phase(s.IDLE)
    spend(s.BACKWARD, 0.02)
    page.awaits()
    page.awaits()
    time.sleep(0.05)
    page.mark(s.IDLE)
    page.awaits()  # not in a backward pass
    time.sleep(0.02)
    os._exit(0)
    """
    view = after(pages, program)
    spent = dict(view.phase_times)
    assert view.phase is RankPhase.IDLE
    assert spent[RankPhase.COMMUNICATE] >= 0.05
    assert spent[RankPhase.IDLE] >= 0.02
    assert sum(spent.values()) == pytest.approx(view.totals.open_s, abs=2e-9)


def test_an_unchanged_script(pages: Pages) -> None:
    program = """
    import io, torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset
    from ddp.telemetry import torch_marks
    torch_marks.install()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(6, 8)), batch_size=2)

    def train(x):
        time.sleep(0.01)
        model(x).sum().backward()
        optimizer.step()

    for (x,) in loader:
        train(x)
    torch.save(model.state_dict(), io.BytesIO())
    with torch.no_grad():
        for (x,) in DataLoader(TensorDataset(torch.ones(90, 8))):
            model(x)
        time.sleep(0.05)
    for _, (x,) in zip(range(2), loader):
        train(x)

    class Endless(IterableDataset):
        def __len__(self):
            raise AssertionError("asked for its length, after which torch warns")
        def __iter__(self):
            yield torch.ones(8)

    rest = iter(DataLoader(Endless()))
    os._exit(0)
    """
    view = after(pages, program)
    spent, totals = dict(view.phase_times), view.totals
    assert view.step == 5
    assert (totals.checkpoints, totals.checkpoint_step) == (1, 3)
    assert spent[RankPhase.EVALUATION] >= 0.05
    assert spent[RankPhase.FORWARD] >= 0.04
    assert sum(totals.steps.bins) == 4
