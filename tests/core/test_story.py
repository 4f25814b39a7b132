"""The box and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import ANY

import pytest

from launcher.failure.story import outcome_json, render_box, torch_error
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass, Outcome

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "<frozen runpy>", line 88, in _run_code\n'
    '  File "/opt/venv/lib/python3.11/site-packages/launcher/rank.py", line 1, in main\n    run()\n'
    '  File "/home/u/train.py", line 9, in <module>\n    main()\n'
    '  File "/env/lib/python3.11/site-packages/torch/nn/module.py", line 5, in forward\n    inner()\n    ^^^^^\n'
    "ValueError: bad batch\n"
)
FIRST = Cause(
    "node-a", 1, 1, FailureClass.USER_EXCEPTION, "ValueError: bad batch", 1,
    traceback=TRACEBACK, step=12, ran_s=3.21, at="2026-03-01 10:00:00", log="/logs/1/stderr.log", hint="look twice",
)  # fmt: skip
LOST = Cause("node-a", 0, 0, FailureClass.CONSEQUENCE, "RuntimeError: Connection closed by peer", 1)
HALTED = Cause(
    "node-b",
    2,
    0,
    FailureClass.CONSEQUENCE,
    "stopped by the launcher (SIGTERM)",
    143,
    signal=15,
    stopped=True,
)
GIVEN_UP = Decision(DecisionKind.FAIL, "the restart budget is used up", 3, FIRST)


def failed(*causes: Cause, **changes: object) -> Outcome:
    base = Outcome(False, "failed", 1, causes[0] if causes else None, causes, 2, (GIVEN_UP,))
    return replace(base, **changes)  # type: ignore[arg-type]


def box(outcome: Outcome, **options: object) -> str:
    chosen = {"width": 100, "color": False, "log_dir": "/logs", "budget": "2", **options}
    return render_box(outcome, **chosen)  # type: ignore[arg-type]


def test_the_whole_story() -> None:
    others = [replace(HALTED, rank=n) for n in (2, 3, 4)]
    assert [line[2:-2].rstrip() for line in box(failed(FIRST, LOST, *others)).splitlines()[1:-1]] == [
        "rank 1 on node-a failed first: ValueError: bad batch",
        "",
        '  File "/home/u/train.py", line 9, in <module>',
        "    main()",
        "  ... 1 library frame below ...",
        "ValueError: bad batch",
        "",
        "when      2026-03-01 10:00:00, 3.2 s after its start, at step 12",
        "others    rank 0 lost its connection to it; 3 other ranks were stopped",
        "restarts  2 of 2 used; not restarted: the restart budget is used up",
        "log       /logs/1/stderr.log",
        "exit code 1",
        "code      DDP-5004 (rank exception); `ddpctl explain DDP-5004` says more",
        "hint      look twice",
    ]


def test_success_says_nothing() -> None:
    assert box(Outcome(True, "done", 0)) == ""


@pytest.mark.parametrize("causes", [(), (HALTED,), (HALTED, replace(HALTED, rank=3))])
def test_an_ordered_end_is_one_line(causes: tuple[Cause, ...]) -> None:
    ordered = Outcome(False, "stopped by SIGINT", 130, causes[0] if causes else None, causes)
    said = box(ordered)
    assert said.startswith("ddp-launch: stopped by SIGINT; ")
    assert said.endswith(" /logs\n")
    assert said.count("\n") == 1


def test_a_consequence_reported_first_is_not_the_cause() -> None:
    assert "rank 1 on node-a failed first" in box(failed(LOST, HALTED, FIRST))
    assert outcome_json(failed(LOST, FIRST))["first_cause"]["rank"] == 1  # type: ignore[index]


def test_only_consequences_are_told_honestly() -> None:
    text = box(failed(LOST, HALTED))
    assert "report only lost connections" in text
    assert "failed first" not in text
    assert outcome_json(failed(LOST, HALTED))["first_cause"] is None


@pytest.mark.parametrize("width", [10, 40, 63, 80, 100, 250])
@pytest.mark.parametrize("unicode", [True, False])
def test_every_line_fits_whatever_the_rank_wrote(width: int, unicode: bool) -> None:
    wild = "日本語" * 50 + " \x1b[31mred\x1b[0m\ttab\a " + "x" * 300 + " 🏖️ end"
    cause = replace(FIRST, reason=wild, traceback=TRACEBACK + wild, hint=wild, log="/" + "y" * 200)
    lines = box(failed(cause, replace(LOST, reason=wild)), width=width, unicode=unicode).splitlines()
    assert {columns(line) for line in lines} == {max(40, min(width, 100))}
    assert all(line.isprintable() for line in lines)
    assert unicode or all(line.isascii() for line in lines)
    assert len(lines) < 70


def columns(line: str) -> int:
    return sum(
        2 if ord(c) in range(0x3000, 0xA000) or ord(c) == 0x1F3D6 else 0 if ord(c) == 0xFE0F else 1
        for c in line
    )


def test_color_is_only_added() -> None:
    import re

    outcome = failed(FIRST, LOST)
    colored = box(outcome, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[\d*m", "", colored) == box(outcome)


def test_deep_tracebacks_keep_the_users_deepest_frames() -> None:
    frames = "".join(f'  File "/home/u/f{i}.py", line {i}, in f\n    call{i}()\n' for i in range(30))
    deep = replace(FIRST, traceback=f"Traceback (most recent call last):\n{frames}ValueError: bad batch\n")
    text = box(failed(deep))
    assert "call29()" in text
    assert "call10()" not in text


def test_frames_of_libraries_are_shown_when_there_are_no_others() -> None:
    only = 'Traceback (most recent call last):\n  File "/lib/python3.11/runpy.py", line 1, in r\n    go()\nE: x\n'
    assert "runpy.py" in box(failed(replace(FIRST, traceback=only)))


def test_json_holds_the_same_facts() -> None:
    told = json.loads(json.dumps(outcome_json(failed(FIRST, LOST, HALTED), log_dir="/logs", budget="2")))
    assert told["first_cause"]["class"] == "user-exception"
    assert told["first_cause"]["traceback"] == TRACEBACK
    assert told["causes"][2]["signal_name"] == "SIGTERM"
    assert told["others"] == ["rank 0 lost its connection to it", "1 other rank was stopped"]
    assert (told["restarts"], told["restart_budget"], told["exit_code"]) == (2, "2", 1)
    assert told["decisions"] == [{"kind": "fail", "reason": "the restart budget is used up", "generation": 3}]


def test_torchs_own_form() -> None:
    first = {"message": "ValueError: bad batch", "errorCode": 1}
    extra = {"py_callstack": TRACEBACK, "timestamp": "1700000000"}
    assert torch_error(failed(LOST, FIRST), 1_700_000_000) == {"message": {**first, "extraInfo": extra}}


@pytest.mark.parametrize(
    ("outcome", "message", "code"),
    [
        (
            failed(Cause("n", 0, 0, FailureClass.SIGNAL, "killed by SIGSEGV", 139, signal=11)),
            "killed by SIGSEGV",
            -11,
        ),
        (Outcome(False, "stopped by SIGINT", 130), "stopped by SIGINT", 130),
    ],
)
def test_torchs_own_form_of_signals(outcome: Outcome, message: str, code: int) -> None:
    assert torch_error(outcome, 1) == {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": ANY, "timestamp": "1"},
            "errorCode": code,
        }
    }


def test_a_lost_node() -> None:
    lost = Cause("node-b", -1, -1, FailureClass.NODE_LOST, "silent for 3 s", 1)
    assert "node node-b failed first: silent for 3 s" in box(failed(lost))


def test_where_no_restart_was_allowed_it_is_said_once() -> None:
    refused = replace(GIVEN_UP, reason="no restarts are allowed (--max-restarts 0)")
    told = box(failed(FIRST, restarts=0, decisions=(refused,)), budget="0")
    assert "restarts  no restarts are allowed (--max-restarts 0) " in told
    assert "not restarted" not in told
