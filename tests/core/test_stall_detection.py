"""Does a rank stand still for too long? Views over time in, verdict-worthy or not out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from launcher.health.stacks import is_local_work, without_doubt, without_ours
from launcher.health.stall_detection import (
    Signs,
    Watch,
    early_questions,
    excused,
    is_idle,
    is_overdue,
    look,
    reports,
    to_look_at,
    waits_for_long,
)
from launcher.settings.spec import Budgets
from launcher.settings.values import BadValue, hang_timeout
from rendezvous.values.rank_view import Collective, GroupView, ProcessView, RankPhase, RankView, Section
from rendezvous.values.types import Cause, Doubt, FailureClass

if TYPE_CHECKING:
    from rendezvous.values.rank_view import RankReport

ASLEEP = ProcessView(True, "S", 1.0, cpu_moved=False)
BUSY = ProcessView(True, "R", 1.0, cpu_moved=True)
VIEW = RankView(0, 17, True, RankPhase.FORWARD, 1.0, quiet_s=1e6, step=9, last_step_s=0.5, process=ASLEEP)
THREE = Budgets(step_s=3.0)


def watched(*moments: tuple[float, RankView], budgets: Budgets = THREE) -> RankReport:
    """What is told after these looks."""
    watch = Watch(moments[0][0])
    for at, view in moments:
        watch = look(watch, [view], at, budgets.period_s)
    (report,) = reports(watch, [moments[-1][1]], budgets)
    return report


def after(seconds: float, view: RankView = VIEW, budgets: Budgets = THREE) -> RankReport:
    steps = int(seconds / budgets.period_s + 0.5)
    return watched(*((i * budgets.period_s, view) for i in range(steps + 1)), budgets=budgets)


def test_time_without_a_sign_adds_up_and_any_sign_ends_it() -> None:
    assert after(2.7).stalled_s == pytest.approx(2.7)
    assert not after(2.7).is_overdue
    assert is_overdue([after(3.3)])
    late = watched(*((i * 0.3, VIEW) for i in range(12)), (3.6, replace(VIEW, quiet_s=0.05)))
    assert late.stalled_s == pytest.approx(0.05)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """A suspended machine, an agent that was stopped."""
    report = watched((0.0, VIEW), (0.3, VIEW), (900.0, VIEW))
    assert report.stalled_s == pytest.approx(0.3 + 3 * THREE.period_s)


def test_one_that_goes_on_after_a_stop_begins_anew() -> None:
    stopped = replace(VIEW, process=ProcessView(True, "T", cpu_moved=False))
    looks = [(i * 0.3, stopped) for i in range(20)]
    assert watched(*looks).is_overdue
    assert watched(*looks, (6.0, VIEW)).stalled_s == 0.0


def test_another_process_begins_anew() -> None:
    assert watched(*((i * 0.3, VIEW) for i in range(20)), (6.0, replace(VIEW, pid=18))).stalled_s == 0.0


def test_one_that_waits_for_the_reader_of_its_output_is_not_judged_and_begins_anew() -> None:
    (blocked,) = excused([VIEW], [VIEW.rank])
    assert excused([VIEW], [VIEW.rank + 1]) == (VIEW,)
    assert after(20.0, blocked).stalled_s == 0.0
    looks = [(i * 0.3, blocked) for i in range(20)]
    assert watched(*looks, (6.0, VIEW)).stalled_s == pytest.approx(0.3)


def test_a_rank_that_never_wrote_is_no_reason_to_ask() -> None:
    never = RankView(0, 17, process=ASLEEP)
    report = after(20.0, never, Budgets(step_s=3.0, start_s=5.0))
    assert report.is_overdue
    assert not is_overdue([report])


def test_one_that_has_ended_is_no_reason_to_ask() -> None:
    report = after(20.0, replace(VIEW, process=ProcessView(False, "Z", cpu_moved=False)))
    assert report.is_overdue
    assert not is_overdue([report])


CALL = Collective(7, "0", 7, "all_reduce")


@pytest.mark.parametrize(
    ("view", "given"),
    [
        (VIEW, 3.0),
        (replace(VIEW, process=BUSY), 3.0),
        (replace(VIEW, group_timeout_s=7200.0), 3.0),
        (replace(VIEW, phase=RankPhase.DATA), 3.0),
        (replace(VIEW, phase=RankPhase.COMMUNICATE, process=BUSY), 3.0),
        (replace(VIEW, phase=RankPhase.CHECKPOINT), 1800.0),
        (replace(VIEW, phase=RankPhase.EVALUATION), 1800.0),
        (replace(VIEW, phase=RankPhase.CHECKPOINT, process=replace(ASLEEP, state="T")), 3.0),
        (replace(VIEW, phase=RankPhase.SECTION, section=Section("x", None, 1.0)), 1800.0),
        (replace(VIEW, phase=RankPhase.SECTION, section=Section("x", 40.0, 1.0)), 40.0),
        (replace(VIEW, phase=RankPhase.STARTING, step=0), 1800.0),
        (replace(VIEW, step=0), 1800.0),
        (replace(VIEW, step=0, collectives=(replace(CALL, number=51),)), 3.0),
    ],
)
def test_each_thing_a_rank_does_has_the_limit_that_the_user_sets(view: RankView, given: float) -> None:
    report = watched((0.0, view), (0.1, view))
    assert (report.limit_s, report.idle_limit_s) == (given, None)
    assert watched((0.0, view), (0.1, view), budgets=Budgets(enabled=False)).limit_s is None


# --- without a limit ---------------------------------------------------------------------------------------

IDLE = Signs(processes=frozenset({17}))


def silent(view: RankView = VIEW, *looks: Signs) -> RankReport:
    """What is told after these looks at the signs of life, ten seconds apart, if nobody has set a limit."""
    watch = Watch(0.0)
    for number, signs in enumerate(looks):
        watch = look(watch, [view], number * 10.0, 10.0, {view.rank: signs})
    (report,) = reports(watch, [view], Budgets())
    return report


def test_by_default_the_limit_is_that_of_the_groups_in_any_phase() -> None:
    for phase in RankPhase:
        assert silent(replace(VIEW, phase=phase)).idle_limit_s == 600.0
        assert silent(replace(VIEW, phase=phase, group_timeout_s=60.0)).idle_limit_s == 600.0
        assert silent(replace(VIEW, phase=phase, group_timeout_s=7200.0)).idle_limit_s == 7200.0
        assert silent(replace(VIEW, phase=phase)).limit_s is None


@pytest.mark.parametrize(
    ("last", "stalled_s", "idle_s"),
    [
        (IDLE, 30.0, 30.0),
        (replace(IDLE, main_cpu_s=0.09), 30.0, 30.0),  # its threads wake up now and then
        (replace(IDLE, main_cpu_s=0.2), 0.0, 30.0),  # it computes, or spins
        (replace(IDLE, other_cpu_s=0.2), 0.0, 0.0),
        (replace(IDLE, io_bytes=100), 30.0, 30.0),
        (replace(IDLE, io_bytes=4096), 0.0, 0.0),
        (replace(IDLE, network_bytes=4096), 30.0, 30.0),
        (replace(IDLE, network_bytes=40960), 0.0, 0.0),
        (replace(IDLE, output=1), 0.0, 0.0),
        (replace(IDLE, processes=frozenset({17, 18})), 0.0, 0.0),
    ],
)
def test_a_sign_of_life_begins_the_time_anew(last: Signs, stalled_s: float, idle_s: float) -> None:
    report = silent(VIEW, IDLE, IDLE, IDLE, last)
    assert (report.stalled_s, report.idle_s) == (stalled_s, idle_s)


def test_a_mark_begins_it_anew_and_a_user_limit_of_a_section_stays_one() -> None:
    assert silent(replace(VIEW, quiet_s=3.0), IDLE, IDLE, IDLE).stalled_s == 3.0
    section = replace(VIEW, phase=RankPhase.SECTION, section=Section("x", 40.0, 41.0))
    assert is_overdue([silent(section, IDLE)])
    assert not is_overdue([silent(VIEW, *(IDLE,) * 200)]), "only the service sees all ranks"


def test_signs_are_looked_at_only_where_the_page_says_nothing() -> None:
    moves, quiet, never = replace(VIEW, quiet_s=1.0), replace(VIEW, rank=1), RankView(2, process=ASLEEP)
    ended = replace(VIEW, rank=3, process=ProcessView(False, "Z"))
    views = (moves, quiet, never, ended)
    assert [view.rank for view in to_look_at(Watch(0.0), views, 20.0, 10.0)] == [1, 2]
    watch = look(Watch(0.0), views, 20.0, 10.0, {1: IDLE})
    assert [view.rank for view in to_look_at(watch, views, 29.0, 10.0)] == [2]
    assert [view.rank for view in to_look_at(watch, views, 30.0, 10.0)] == [1, 2]


def in_call(entered_s: float, **how: object) -> RankView:
    inside = Collective(7, "0", 7, "all_reduce", entered_s=entered_s)
    view = replace(VIEW, collectives=(inside,), groups=(GroupView("0", 2, "0-1", 7, 6),), quiet_s=entered_s)
    return replace(view, **how)  # type: ignore[arg-type]


def test_the_service_is_asked_soon_after_a_rank_has_begun_to_wait_and_then_less_and_less() -> None:
    told = [early_questions([silent(in_call(at), IDLE)]) for at in (9.0, 10.0, 19.0, 20.0, 39.0, 41.0, 80.0)]
    assert not told[0]
    assert told[1] == told[2] != told[3] == told[4] != told[5] != told[6]
    assert not early_questions([replace(silent(in_call(99.0), IDLE), alive=False)])
    assert not early_questions([after(20.0, in_call(99.0))]), "the user has set a limit"


def test_it_is_asked_again_if_a_rank_of_a_group_is_idle_since_its_limit() -> None:
    idle = replace(VIEW, groups=(GroupView("0", 2, "0-1", 7, 7),))
    assert not is_idle([silent(idle, *(IDLE,) * 60)])
    assert is_idle([silent(idle, *(IDLE,) * 61)])
    assert not is_idle([silent(VIEW, *(IDLE,) * 99)]), "no process group"
    assert not is_idle([after(20.0, idle)]), "the user has set a limit"


def test_a_call_that_failed_or_runs_in_the_background_is_no_wait() -> None:
    """The rank has done something else since it entered the call."""
    assert silent(in_call(50.0), IDLE).waits_s == 50.0
    assert silent(in_call(50.0, quiet_s=40.0), IDLE).waits_s == 0.0
    assert silent(in_call(50.0, quiet_s=40.0, phase=RankPhase.COMMUNICATE), IDLE).waits_s == 50.0


def test_a_wait_beyond_the_limit_is_worth_a_warning() -> None:
    assert waits_for_long([silent(in_call(620.0), IDLE)]) is None
    told = silent(in_call(640.0), IDLE)
    assert waits_for_long([silent(VIEW, IDLE), told]) is told
    assert waits_for_long([silent(in_call(640.0, group_timeout_s=7200.0), IDLE)]) is None
    assert waits_for_long([after(20.0, in_call(640.0))]) is None


def test_a_section_with_a_timeout_is_over_when_it_says_so() -> None:
    """Whatever it does meanwhile."""
    view = replace(VIEW, quiet_s=0.0, phase=RankPhase.SECTION, section=Section("x", 40.0, 41.0))
    assert watched((0.0, view), (0.3, view)).is_overdue


def test_what_is_told_fits_into_its_bounds() -> None:
    calls = tuple(
        Collective(i, "0", i, "all_reduce", finished_s=None if i in (1, 2) else 1.0) for i in range(1, 17)
    )
    groups = (*(GroupView(f"g{i}", 2, "x" * 300) for i in range(8)), GroupView("0", 2, "0-1"))
    view = replace(
        VIEW, collectives=calls, groups=groups, message="m" * 999, section=Section("s" * 999, None, 1.0)
    )
    report = after(0.3, view)
    assert [call.number for call in report.calls] == [1, 2, 11, 12, 13, 14, 15, 16]
    assert [group.name for group in report.groups][:2] == ["0", "g0"]
    assert (len(report.groups), report.groups[1].members) == (8, "")
    assert (len(report.message), len(report.section)) == (200, 200)


# --- the option ----------------------------------------------------------------------------------------------


def test_the_option_sets_what_it_names() -> None:
    assert hang_timeout("auto") == Budgets()
    assert hang_timeout("off") == Budgets(enabled=False)
    assert hang_timeout("30s") == Budgets(step_s=30.0)
    assert hang_timeout("10min") == Budgets(step_s=600.0)
    asked = hang_timeout("30s, start=1m, first-step=2m,checkpoint=3m,evaluation=4m")
    assert asked == Budgets(True, 30.0, 60.0, 120.0, 180.0, 240.0)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "soon", "off,start=3", "auto,start=3", "3,", "3,start", "3,step=4", "3,start=0"]
)
def test_what_the_option_does_not_understand_is_said(text: str) -> None:
    with pytest.raises(BadValue):
        hang_timeout(text)


def test_looks_are_as_often_as_the_shortest_limit_needs() -> None:
    assert Budgets().period_s == 1.0
    assert THREE.period_s == pytest.approx(0.3)
    assert Budgets(step_s=0.2).period_s == 0.1


# --- stacks ----------------------------------------------------------------------------------------------

STACKS = """\
Main thread (most recent call first):
  File "{inner}", line 7 in forward
  File "/home/me/train.py", line 30 in <module>

Thread 17 (most recent call first):
  File "/lib/python3.11/threading.py", line 331 in wait
"""


def test_the_main_thread_tells_whose_business_it_is() -> None:
    own = STACKS.format(inner="/home/me/model.py")
    assert is_local_work(own)
    assert not is_local_work(own.partition("\n\n")[2]), "the main thread did not answer"
    assert not is_local_work(STACKS.format(inner="/x/site-packages/torch/autograd/graph.py"))
    assert not is_local_work("no Python stack: the process is stopped")


def test_a_doubt_is_lifted_by_the_stack_and_by_nothing_else() -> None:
    reason = "has made no progress for 3.0 s in its forward pass"
    cause = Cause("n", 1, 1, FailureClass.HANG, reason, 124, doubt=Doubt.MAY_WAIT, suspects=(1,))
    own = 'Main thread (most recent call first):\n  File "/me/model.py", line 3 in forward'
    assert without_doubt(cause, own) == replace(cause, doubt=None, suspects=())
    assert without_doubt(cause, own.replace("/me/", "/x/torch/")) == cause
    two = replace(cause, doubt=Doubt.CULPRIT, suspects=(0, 1))
    assert without_doubt(two, own) == two


WITH_OURS = """Main thread (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4 in barrier
  File "/app/ddp/telemetry/torch_marks.py", line 9 in marked
  File "/home/me/ddp/train.py", line 6 in <module>

Thread 12 (most recent call first):
  File "/app/ddp/telemetry/guard.py", line 386 in _run
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 13 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 14 (most recent call first):
  File "/home/me/ddp/train.py", line 3 in work
  File "/app/ddp/telemetry/observing.py", line 81 in guarded

thread 11 (python): S, in futex_wait
    [<0>] futex_wait+0x67/0x120
thread 12 (python): S, in poll
    [<0>] do_sys_poll+0x1/0x2
thread 14 (python): R"""


def test_for_people_the_stacks_are_those_of_the_script() -> None:
    """Our threads are left out, also of the kernel's list, and our frames between those of others."""
    left_out = ("torch_marks", "guard.py", "Thread 12", "thread 12", "do_sys_poll", "observing")
    shown = without_ours(WITH_OURS)
    assert [words for words in left_out if words in shown] == []
    kept = [line for line in WITH_OURS.splitlines() if not any(words in line for words in left_out)]
    kept.remove('  File "/usr/lib/python3.11/threading.py", line 982 in run')
    assert shown.splitlines() == [line for n, line in enumerate(kept) if line or kept[n - 1]]
    assert without_ours("the process has ended") == "the process has ended"
