"""`ddpctl drill`: a rank of a running job is killed or frozen, if the job allows it, and the journal says by whom."""

from __future__ import annotations

import os
import pty
import re
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from launched import Launched, eventually
from test_ddpctl_questions import Ctl, scene_in

from launcher.answers.desk import drill_problem
from rendezvous.access.auth import Role
from rendezvous.values.questions import DrillWanted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (DrillWanted(1, 3), ""),
        (DrillWanted(1, 3, 600.0), ""),
        (DrillWanted(1, 2), "does not run in generation 2"),
        (DrillWanted(1, 3, 601.0), "at most 600 s"),
        (DrillWanted(1, 3, float("nan")), "at most 600 s"),
        (DrillWanted(1, 3, -1.0), "at most 600 s"),
    ],
)
def test_only_the_rank_that_was_seen_is_met(wanted: DrillWanted, words: str) -> None:
    found = drill_problem(wanted, 3)
    assert (words in found, bool(found)) == (True, bool(words))
    assert drill_problem(wanted, 0), "no process"


def first_lines(job: Launched) -> int:
    return job.stdout().count("first line of rank 1")


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.fixture
def typed_no(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal on which somebody types "n"."""
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield
    os.close(ours)


def test_a_killed_rank_starts_again_and_the_journal_says_who_did_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene_in(tmp_path, "--max-restarts", "1", "--allow-drill") as scene:
        ctl = Ctl(capsys, monkeypatch, scene)
        pid, other = map(int, re.findall(r'"pid": (\d+)', ctl.answer("top", "-o", "json")))
        code, _, err = ctl("drill", "kill", "1", "--yes")
        assert (code, "role viewer does not permit to control jobs" in err) == (77, True)

        code, out, err = ctl("drill", "asked", "freeze", "0", "--for", "0.5", "--yes", role=Role.OPERATOR)
        assert (code, f"pid {pid} on" in out) == (0, True), err
        eventually(lambda: "rank 0 frozen for 0.5 s" in ctl.answer("events", "asked"))
        eventually(lambda: not is_stopped(pid), what="it goes on")

        def freeze(rank: int, for_s: str) -> None:
            drill = ctl("drill", "freeze", str(rank), "--for", for_s, "--yes", role=Role.OPERATOR)
            assert drill[0] == 0, drill

        freeze(0, "0.5")
        freeze(0, "600")
        freeze(1, "0.5")
        eventually(lambda: not is_stopped(other), what="it goes on, and all that ended earlier has ended")
        assert is_stopped(pid), "the end of the first time is not that of the second"
        freeze(0, "0.1")
        eventually(lambda: not is_stopped(pid), what="it goes on")
        code, _, err = ctl("drill", "kill", "2", "--yes", role=Role.OPERATOR)
        assert (code, "rank 2" in err) == (1, True), err

        code, out, err = ctl("drill", "kill", "1", "--yes", "--reason", "to see", role=Role.OPERATOR)
        assert code == 0, err
        eventually(lambda: first_lines(scene.job) == 2, what="the ranks start again")
        told = eventually(
            lambda: re.search(r"drill by (.+), pid \d+: rank 1 killed: to see", ctl.answer("events", "asked"))
        )
        assert told[1].startswith("token ")
        assert "SIGKILL" in ctl.answer("why")
        eventually(lambda: "rank 1 killed: to see" in scene.job.stderr(), what="the owner is told")
        scene.say("9-end")
        assert scene.job.wait() == 0


def test_a_job_whose_owner_has_not_allowed_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed_no: None
) -> None:
    with scene_in(tmp_path) as scene:
        ctl = Ctl(capsys, monkeypatch, scene)
        ctl.answer("stacks", "0")
        code, _, err = ctl("drill", "kill", "1", role=Role.OPERATOR)
        assert (code, "kill rank 1 of job asked (2 ranks, generation 1)? [y/N]" in err) == (1, True)
        assert "nothing was done" in err
        code, _, err = ctl("drill", "kill", "1", "--yes", role=Role.OPERATOR)
        assert (code, "ddp-launch --allow-drill" in err) == (1, True)
        code, _, err = ctl("drill", "kill", "1", "--yes", "--for", "3s", role=Role.OPERATOR)
        assert (code, "--for goes with freeze" in err) == (2, True)
        with open(os.devnull) as nobody:
            monkeypatch.setattr(sys, "stdin", nobody)
            code, _, err = ctl("drill", "kill", "1", role=Role.OPERATOR)
        assert (code, "add --yes" in err) == (2, True)
        scene.say("9-end")
        assert scene.job.wait() == 0
        assert first_lines(scene.job) == 1
