"""A job without a service is there after its end: for another terminal, also if its launcher was killed."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from served import serving

from rendezvous.control.ctl import main

if TYPE_CHECKING:
    from launched import Launch

SCRIPT = """
import os, sys, time
print("a line of rank", os.environ["RANK"], "in", os.environ["DDP_GENERATION"], flush=True)
while os.path.exists(os.path.join(os.environ["THERE"], "stay")):
    time.sleep(0.02)
if os.environ["RANK"] == "1" and os.environ["DDP_GENERATION"] == "1":
    sys.exit(3)
"""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, runtime: str) -> dict[str, str]:
    """The variables of the command and of ddpctl."""
    monkeypatch.setenv("DDP_LAUNCH_HISTORY_DIR", f"{runtime}/history")
    return {"XDG_RUNTIME_DIR": runtime, "DDP_LAUNCH_HISTORY_DIR": f"{runtime}/history"}


def ctl(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_all_that_ddpctl_tells_of_a_job_it_tells_after_the_end(
    kept: dict[str, str], launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preflight", "off")
    assert launch(*words, source=SCRIPT, fake_torch="", env=kept).wait() == 0
    assert ctl(capsys, "list") == "no jobs\n1 job has ended: `ddpctl list --all`\n"
    (found,) = json.loads(ctl(capsys, "list", "--all", "-o", "json"))["jobs"]
    assert (found["phase"], found["succeeded"], found["restarts"]) == ("PHASE_ENDED", True, 1)
    assert found["ended_at"] > found["began_at"] > 1.7e9
    assert "succeeded" in ctl(capsys, "list", "--all")
    for name in ((), (found["job_id"],)):
        assert "generation 1: restart: rank 1" in ctl(capsys, "status", *name)
        told = ctl(capsys, "why", *name)
        assert "verdict     exit-code: " in told
        assert "took        detect " in told
        events = ctl(capsys, "events", *name)
        assert [word for word in ("sealed", "stopping", "ended") if word not in events] == []
        assert ctl(capsys, "watch", *name) == events
        assert re.fullmatch(
            r"succeeded, generation 2, 1 restart, .*\nit has ended: .*\n", ctl(capsys, "top", *name)
        )
        assert sorted(line.partition("] ")[2] for line in ctl(capsys, "logs", *name).splitlines()) == [
            "a line of rank 0 in 2",
            "a line of rank 1 in 2",
        ]
    assert main(["restart", found["job_id"]]) == 1
    assert "has ended: all ranks finished" in capsys.readouterr().err
    assert main(["restart"]) == 1
    assert "no job runs (1 has ended" in capsys.readouterr().err
    assert main(["why", "other"]) == 75
    assert "'other' is none of your jobs on this machine (`ddpctl list --all`" in capsys.readouterr().err


def test_a_job_whose_launcher_was_killed_is_there_and_its_output_too(
    kept: dict[str, str], launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch("--nproc-per-node", "2", "--preflight", "off", source=SCRIPT, fake_torch="", env=kept)
    (job.there / "stay").write_text("")
    folder = kept["DDP_LAUNCH_HISTORY_DIR"]
    eventually(lambda: os.path.isdir(folder) and any(each.endswith(".story") for each in os.listdir(folder)))
    eventually(lambda: job.stdout().count("a line of rank") == 2)
    job.send(signal.SIGKILL)
    job.wait()
    (job.there / "stay").unlink()
    assert "ended without a report" in ctl(capsys, "list", "--all")
    assert "no rank has failed; its launcher on " in ctl(capsys, "why")
    assert "a line of rank 1 in 1" in ctl(capsys, "logs", "--rank", "1")


@pytest.mark.parametrize("chosen", ["FILE", "FILE/below", "/proc/1/not-there"])
def test_a_folder_that_cannot_be_used_changes_nothing(
    chosen: str, kept: dict[str, str], launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = os.path.join(kept["XDG_RUNTIME_DIR"], "file")
    open(file, "w").close()
    kept["DDP_LAUNCH_HISTORY_DIR"] = chosen.replace("FILE", file)
    job = launch(
        "--preflight", "off", "--nproc-per-node", "1", source="print('ran')", fake_torch="", env=kept
    )
    assert (job.wait(), job.stderr()) == (0, "")


def test_the_output_of_a_finished_job_of_a_service_is_read_where_its_logs_are(
    kept: dict[str, str], launch: Launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--nproc-per-node", "2", "--preflight", "off", "--max-restarts", "1")
    with serving("--store", "memory") as service:
        monkeypatch.setenv("DDP_RENDEZVOUS", service.endpoint)
        place = ("--rendezvous", service.endpoint, "--log-dir", kept["XDG_RUNTIME_DIR"], "--nnodes", "1:2")
        assert launch(*words, *place, source=SCRIPT, fake_torch="", env=kept).wait() == 0
        told = ctl(capsys, "logs").splitlines()
        assert sorted(line.partition("] ")[2] for line in told) == [
            "a line of rank 0 in 2",
            "a line of rank 1 in 2",
        ]
        searched = ctl(capsys, "logs", "--grep", r"rank 1 in \d", "--no-prefix").splitlines()
        assert searched == ["a line of rank 1 in 1", "a line of rank 1 in 2"], "of all generations"
        (found,) = json.loads(ctl(capsys, "list", "--all", "-o", "json"))["jobs"]
        assert found["ended_at"] > found["began_at"] > 1.7e9
    assert not os.path.exists(kept["DDP_LAUNCH_HISTORY_DIR"]), "a service keeps it"
