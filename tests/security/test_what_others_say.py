"""Reasons come from other machines, and from the service: they must not steer the terminal of this one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from launcher.exchange import AgentStep, Finish
from launcher.failure.ending import tell
from launcher.output.log_file import LogFolder
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.supervision import AgentPhase, Supervision
from launcher.wiring import UserMessages
from rendezvous.values.events import CheckpointRequested, Notice, Stop, Waiting
from rendezvous.values.types import AgentId, Decision, DecisionKind, JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.exchange import AgentEvent

SPEC = LaunchSpec(EntryPoint(EntryKind.SCRIPT, "train.py"), JobSpec("run-1"), nproc=2)
HOSTILE = "bad \x1b[2J\x9b31m\x1b]0;title\x07 \u202e\r\nddp-launch: all is well"
PRINTED = "bad  [2J 31m ]0;title     ddp-launch: all is well"


@pytest.mark.parametrize(
    "fact",
    [
        Stop(1, Decision(DecisionKind.RESTART, HOSTILE, 1)),
        Waiting(HOSTILE, 1, 2, stands_by=True),
        Notice(1, HOSTILE),
        CheckpointRequested(1, HOSTILE),
    ],
    ids=lambda fact: type(fact).__name__,
)
def test_what_is_told_of_other_nodes_is_one_line_without_orders(fact: AgentEvent) -> None:
    lines: list[str] = []
    state = Supervision(AgentId("a", "1"))
    before = replace(state, phase=AgentPhase.RUNNING)
    UserMessages(SPEC, lines.append).observe(AgentStep(fact, before, state, ()))
    (line,) = lines
    assert line.startswith("ddp-launch: ")
    assert line.isprintable()
    assert line.endswith(PRINTED)


def test_a_service_that_refuses_gives_the_terminal_no_orders(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tell(SPEC, LogFolder(SPEC), Finish(77, HOSTILE), lambda _removes: None, missing="") == 77
    said = capfd.readouterr().err
    assert said.startswith("ddp-launch: bad  [2J 31m")
    assert said.replace("\n", "").isprintable()
