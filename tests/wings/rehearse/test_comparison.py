"""What a rehearsal plans, compares and says: pure."""

from __future__ import annotations

from typing import Any

from ddp_launch_wings.rehearse import rehearsal_report as report
from ddp_launch_wings.rehearse.comparison import (
    aligned,
    compared_curves,
    compared_files,
    first_difference,
    returns,
    track,
)
from ddp_launch_wings.rehearse.faults import KINDS, missing, plan
from ddp_launch_wings.rehearse.rehearsal_report import Run, compare


def lines(
    numbers: Any, *, seeds: int = 0, shift: int = 0, killed: bool = False, at: float = 0.0
) -> list[Any]:
    """A process that makes these steps: weights w3 before step 3, and so on. `shift`: its inputs are others."""
    found: list[Any] = [{"kind": "process", "at": at}]
    for count, number in enumerate(numbers, 1):
        generators = {"torch": f"g{count if seeds else number}", "python": f"unused{seeds}"}
        step = {
            "weights": f"w{number}",
            "optimizer": f"o{number}",
            "rates": [0.1],
            "inputs": f"i{number + shift}",
        }
        found.append({"kind": "step", "at": at + number, "generators": generators, **step})
        if not killed or number != numbers[-1]:
            found.append({"kind": "done", "at": at + number + 0.5})
            found.append({"kind": "values", "at": at + number + 0.6, "values": [{"loss": 1 / number}]})
    if not killed:
        found.append({"kind": "final", "at": at + 99, "weights": {"a": "1"}})
    return found


WHOLE = track([lines(range(1, 11))])


def run(*processes: list[Any], play: bool = True, code: int = 0) -> Run:
    chosen = next(plan(["kill"], 1, 10, 2, 1)) if play else None
    return Run(chosen, code, 5.0, {}, "no restarts left", (track(processes),), {})


def sentences(played: Run) -> str:
    reference = run(lines(range(1, 11)), play=False)
    found = compare(reference, played)
    whole = report.Rehearsal("train.py", 1, reference, compare(reference, reference), (found,), ())
    return report.text(whole)


def test_the_same_seed_gives_the_same_plan_and_never_the_first_or_last_step() -> None:
    for seed in range(200):
        plays = list(plan([*KINDS], seed, 6, 4, 2))
        assert plays == list(plan([*KINDS], seed, 6, 4, 2))
        assert all(2 <= each.step < 6 for each in plays)
        assert {each.rank for each in plays if each.kind.name == "kill"} <= {1, 2, 3}
        assert {each.rank for each in plays if each.kind.name == "node"} == {2}
    assert len({each.step for seed in range(50) for each in plan(["kill"], seed, 6, 4, 1)}) == 4


def test_a_fault_that_cannot_be_played_says_why() -> None:
    assert missing(KINDS["kill"], 1, is_root=False, has_tools=False) == ""
    assert "root" in missing(KINDS["disk"], 1, is_root=False, has_tools=True)
    assert "--nnodes 2" in missing(KINDS["node"], 1, is_root=True, has_tools=True)
    assert missing(KINDS["network"], 2, is_root=True, has_tools=True) == ""


def test_a_process_is_found_by_its_weights() -> None:
    played = track([lines(range(1, 8), killed=True), lines(range(5, 11))])
    assert aligned(WHOLE, played) == [*range(7), *range(4, 10)]
    (back,) = returns([WHOLE], [played])
    assert (back.finished, back.at, back.lost) == (6, 5, 2)


def test_a_step_that_is_repeated_by_the_same_process_costs_nothing() -> None:
    steps = lines(range(1, 5), killed=True) + lines(range(4, 11))[1:]
    assert aligned(WHOLE, track([steps])) == [0, 1, 2, 3, *range(3, 10)]
    assert returns([WHOLE], [track([steps])]) == []
    assert first_difference([WHOLE], [track([steps])]) is None


def test_constant_weights_are_counted_on() -> None:
    def constant(numbers: Any) -> Any:
        return [each | {"weights": "w"} if each["kind"] == "step" else each for each in lines(numbers)]

    whole = track([constant(range(1, 11))])
    assert aligned(whole, whole) == list(range(10))


def test_the_first_difference_is_named_with_what_it_is_equal_to() -> None:
    played = track([lines(range(1, 8), killed=True), lines(range(5, 11), seeds=1)])
    first = first_difference([WHOLE], [played])
    assert first is not None
    assert (first.step, first.what, first.again, first.is_new_process) == (5, ("torch",), {"torch": 1}, True)


def test_a_run_that_ends_as_the_undisturbed_one_is_the_same() -> None:
    said = sentences(run(lines(range(1, 8), killed=True), lines(range(7, 11), at=2.0)))
    assert "same\n  lost: 0 steps (it went on at step 7); 3.0 s without a step" in said
    assert "no difference" in said


def test_each_cause_has_its_advice() -> None:
    first = lines(range(1, 8), killed=True)
    first.insert(1, {"kind": "line", "at": 0.0, "what": "manual_seed", "where": "train.py:7"})
    first.insert(1, {"kind": "line", "at": 0.0, "what": "save", "where": "train.py:24"})
    whole = [*first[:3], *lines(range(1, 11))]
    reference = run(whole, play=False)
    for change, words in (
        ({"optimizer": "other"}, "optimizer.state_dict() (train.py:24)"),
        ({"rates": [0.5]}, "scheduler.state_dict()"),
        ({"inputs": "i1"}, "are those of step 1 again"),
        ({"generators": {"torch": "g1"}}, "sets its seed anew (train.py:7)"),
        ({"weights": "other"}, "weights that no step"),
    ):
        second = [{**each, **change} if each["kind"] == "step" else each for each in lines(range(5, 11))]
        found = compare(reference, replaced(run(first, second)))
        assert found.verdict == "differs"
        rehearsal = report.Rehearsal("train.py", 1, reference, compare(reference, reference), (found,), ())
        assert words in report.text(rehearsal), words
        assert "<svg" in report.page(rehearsal)


def replaced(played: Run) -> Run:
    """With other weights at the end."""
    (track_of_it,) = played.tracks
    changed = type(track_of_it)(track_of_it.steps, {"a": "2"}, track_of_it.lines)
    return Run(played.play, 0, 5.0, {}, "", (changed,), {})


def test_undisturbed_runs_that_differ_are_said_first() -> None:
    reference, other = run(lines(range(1, 11)), play=False), run(lines(range(1, 11), shift=3), play=False)
    again = compare(reference, replaced(other))
    said = report.text(report.Rehearsal("train.py", 1, reference, again, (), ()))
    assert "the two runs differ, so differences after a fault prove nothing" in said
    assert "step 1, rank 0: the inputs of the model" in said


def test_rows_that_were_written_twice_are_counted() -> None:
    before = "0,1.5\n1,1.25\n2,1.0\n"
    (same_numbers,) = compared_files({"log.csv": before}, {"log.csv": "0,1.5\n1,1.25\n1,1.25\n2,1.0\n"})
    assert (same_numbers.words, same_numbers.repeated) == ("has 1 row more than once", 1)
    (others,) = compared_files({"log.csv": before}, {"log.csv": "0,1.5\n1,1.25\n1,9\n2,8\n"})
    assert others.words == "has 1 row more than once and has other numbers in 1 of 3 rows"
    (missing_row,) = compared_files({"log.csv": before}, {"log.csv": "0,1.5\n2,1.0\n"})
    assert missing_row.words == "lacks 1 of 3 rows"
    assert compared_files({"a": b"1"}, {"a": b"1"}) == []


def test_values_that_were_logged_twice_are_named() -> None:
    said = sentences(run(lines(range(1, 8), killed=True), lines(range(5, 11))))
    assert "logged more than once: the values of 2 steps, from step 5 on" in said
    assert "logged more than once" not in sentences(run(lines(range(1, 8), killed=True), lines(range(7, 11))))


def test_a_curve_has_the_last_value_of_a_repeated_step() -> None:
    played = track([lines(range(1, 8)), lines(range(6, 11))])
    (curve,) = compared_curves([WHOLE], [played])
    assert (curve.differs_from, curve.missing, curve.steps) == (None, 0, 10)


def test_a_job_that_failed_says_why_and_what_would_help() -> None:
    said = sentences(run(lines(range(1, 8), killed=True), code=137))
    assert "failed with exit code 137: no restarts left" in said


def test_without_logged_values_the_line_to_add_is_shown() -> None:
    silent = [each for each in lines(range(1, 11)) if each["kind"] != "values"]
    reference = run(silent, play=False)
    said = report.text(report.Rehearsal("train.py", 1, reference, compare(reference, reference), (), ()))
    assert 'ddp.log({"loss": loss.item()}, step=step)' in said
