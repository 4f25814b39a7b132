"""The story of a failure: every part is there, in words, and what is not known is called so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launcher.failure.story import outcome_json
from rendezvous.control.why import NotAStory, Story, slowest, story_in, story_text, times_text, with_journal
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.cause_text import cause_from_json, cause_json
from rendezvous.values.questions import RestartTimes
from rendezvous.values.types import Cause, Decision, DecisionKind, Doubt, FailureClass, Outcome

CAUSE = Cause(
    node="node1",
    rank=9,
    local_rank=1,
    failure=FailureClass.OUT_OF_MEMORY,
    reason="killed by SIGKILL (out of memory)",
    exit_code=137,
    step=120,
    ran_s=12.34,
    at="2026-11-23 07:45:10",
    log="/logs/stderr.log",
    hint="use a smaller batch",
    place="in backward, bucket 3 of 7",
    traceback="a\nb",
)
TIMES = RestartTimes(4, 0.002, 0.05, 0.01, 0.04, 1.5, 0.25, 12.0)


def test_a_story_has_all_its_parts() -> None:
    others = tuple(replace(CAUSE, rank=rank, reason="lost its peer") for rank in (0, 1, 2, 8))
    text = story_text(
        Story(
            "llama",
            3,
            CAUSE,
            ("restart: rank 9 on node1: out of memory; restarting",),
            others,
            TIMES,
            health=("a disk is full",),
        )
    )
    for part in (
        "job         llama, generation 3",
        "what failed rank 9 on node1",
        "verdict     out-of-memory: killed by SIGKILL (out of memory)",
        "certainty   certain",
        "when        2026-11-23 07:45:10, 12.3 s after its start",
        "where       in backward, bucket 3 of 7",
        "step        120",
        "exit code   137",
        "hint        use a smaller batch",
        "log         /logs/stderr.log on node1",
        "others      ranks 0-2 and 8: lost its peer",
        "health      a disk is full",
        "decided     restart: rank 9 on node1: out of memory; restarting",
        "\n\n  a\n  b",
    ):
        assert part in text, part
    assert "detect 2 ms" in text


def test_a_doubtful_cause_is_called_uncertain() -> None:
    text = story_text(Story("j", 1, replace(CAUSE, doubt=Doubt.CULPRIT, suspects=(3, 4))))
    assert "cause uncertain: ranks 3 and 4: killed" in text
    assert "certainty   uncertain" in text


def test_a_hang_shows_stacks_and_long_ones_are_shortened() -> None:
    hang = replace(CAUSE, failure=FailureClass.HANG, traceback="\n".join(f"line {n}" for n in range(500)))
    text = story_text(Story("j", 1, hang))
    assert "stacks:\n  line 0\n" in text
    assert "(440 lines: -o json has all)" in text
    assert "line 499" in text


def test_the_restart_takes_as_long_as_on_its_slowest_node() -> None:
    other = replace(TIMES, detect_s=None, stop_s=0.5, init_s=1.0)
    found = slowest([TIMES, other, replace(TIMES, generation=9, stop_s=99.0)], 4)
    assert found == replace(TIMES, stop_s=0.5)
    assert slowest([TIMES], 5) is None


def test_a_part_that_a_node_has_not_reached_is_unknown() -> None:
    assert slowest([TIMES, replace(TIMES, init_s=None)], 4) == replace(TIMES, init_s=None)


def test_the_journal_fills_in_what_agents_have_not_said() -> None:
    events = [
        pb.Note(at=10.0, generation=3, kind="decision"),
        pb.Note(at=10.0, generation=3, kind="stopping"),
        pb.Note(at=10.5, generation=4, kind="stopped"),
        pb.Note(at=11.5, generation=4, kind="running"),
    ]
    assert with_journal(None, events, 4) == RestartTimes(4, stop_s=0.5, meet_s=1.0)
    assert with_journal(TIMES, events, 4) == TIMES
    assert with_journal(None, [], 4) is None


def test_times_add_up_and_unknown_ones_are_named() -> None:
    assert times_text(TIMES).endswith("together 13.9 s")
    partly = times_text(RestartTimes(4, stop_s=0.5))
    assert "init unknown" in partly
    assert "together" not in partly
    assert times_text(None).startswith("not known")


@pytest.mark.parametrize("width", [60, 70, 80, 90, 100])
def test_a_number_and_its_unit_stay_in_one_line(width: int) -> None:
    lines = story_text(Story("llama", 3, CAUSE, times=TIMES), width).splitlines()
    assert "detect 2 ms" in "\n".join(lines)
    assert not [line for line in lines if line.split()[:1] in (["s"], ["s,"])]


def test_the_file_of_a_failed_job_tells_the_same() -> None:
    other = replace(CAUSE, rank=0, failure=FailureClass.CONSEQUENCE, reason="lost its peer")
    decisions = (
        Decision(DecisionKind.RESTART, "again", 3, CAUSE),
        Decision(DecisionKind.FAIL, "no restarts left", 4),
    )
    outcome = Outcome(False, "failed", 137, CAUSE, (CAUSE, other), 1, decisions)
    story = story_in(json.dumps(outcome_json(outcome, log_dir="/logs/llama-1")))
    assert (story.job, story.generation, story.restarts) == ("llama-1", 4, 1)
    assert story.cause == CAUSE
    assert story.others == (other,)
    assert story.decided == ("fail: no restarts left",)
    assert "verdict     out-of-memory" in story_text(story)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "first_cause": 3}'])
def test_another_file_is_refused_in_words(text: str) -> None:
    with pytest.raises(NotAStory, match="it "):
        story_in(text)


def test_a_cause_comes_back_from_its_json_whole() -> None:
    """A field that only one side knows would be lost."""
    full = Cause(
        "n1",
        3,
        1,
        FailureClass.HANG,
        "waits",
        124,
        15,
        "stack",
        7,
        2.5,
        "12:00",
        "/log",
        "hint",
        Doubt.CULPRIT,
        (3, 4),
    )
    full = replace(full, stopped=True, place="in backward")
    assert cause_from_json(json.loads(json.dumps(cause_json(full)))) == full
