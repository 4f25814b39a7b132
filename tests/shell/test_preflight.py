"""The pre-flight as its users meet it: the doctor's table, a machine that is turned away, nodes that meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from launched import eventually
from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch, Launched

UNWRITABLE = "/proc/self"  # whoever asks, root too
# A Python without torch: the trial of `full` is over at once.
BARE = {"PYTHON_EXEC": getattr(sys, "_base_executable", sys.executable), "DDP_RENDEZVOUS_INSECURE": "1"}


@pytest.fixture
def port() -> int:
    return free_port()


def doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "launcher", "doctor", *words)
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=100)


def graded(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["grade"] for check in report["checks"]}


# --- the doctor ----------------------------------------------------------------------------------------


def test_the_doctor_needs_nothing_but_the_machine_and_leaves_nothing_there(tmp_path: Path) -> None:
    logs, kept = tmp_path / "logs", tmp_path / "kept"
    logs.mkdir()
    words = ("--preflight", "quick", "--log-dir", str(logs), "--preflight-paths", str(kept))
    done = doctor("--json", *words)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] < 2, done.stdout
    assert (done.stderr, report["fit"], report["level"]) == ("", True, "quick")
    grades = graded(report)
    assert grades[f"logs in {logs}"] in ("ok", "warn")
    assert grades[f"checkpoints in {kept}"] in ("ok", "warn")
    assert list(tmp_path.iterdir()) == [logs]
    assert not list(logs.iterdir())


def test_the_table_is_for_people_and_the_exit_code_for_scripts() -> None:
    done = doctor("--preflight", "quick", "--preflight-paths", UNWRITABLE, NO_COLOR="1")
    assert done.returncode == 2
    assert "\x1b" not in done.stdout
    assert f"fail    checkpoints in {UNWRITABLE}" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("failed: 1 check failed")


@pytest.mark.nightly(instead="core/test_checkup.py")
def test_full_lets_the_cpu_work() -> None:
    report = json.loads(doctor("--json").stdout)
    assert report["level"] == "full"
    assert graded(report)["load test of the CPU"] in ("ok", "warn")
    assert report["versions"]["torch"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py",), "unexpected argument 'train.py'"),
        (
            ("--preflight", "off"),
            "invalid --preflight 'off': ",
        ),
        (("--preflight", "half"), "invalid --preflight 'half': "),
    ],
)
def test_a_wrong_command_is_told_in_one_line(words: tuple[str, ...], said: str) -> None:
    done = doctor(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ddp-launch: error: {said}")
    assert done.stderr.count("\n") == 1


# --- one machine ---------------------------------------------------------------------------------------


def test_an_unfit_machine_starts_no_rank_and_says_why(launch: Launch) -> None:
    words = ("--nproc-per-node", "1", "--preflight-paths", UNWRITABLE)
    ran = "import os; open(os.path.join(os.environ['THERE'], 'ran'), 'w')"
    job = launch(*words, source=ran, fake_torch="")
    assert job.wait() == 71
    assert "this machine failed its pre-flight check: checkpoints in /proc/self: " in job.stderr()
    assert "--preflight off" in job.stderr()
    assert not list(job.there.iterdir())
    job.assert_nothing_left()
    nevertheless = launch(*words, "--preflight", "off", source="print('ran')", fake_torch="")
    assert nevertheless.wait() == 0
    assert "ran" in nevertheless.stdout()


def test_a_check_that_nobody_asked_for_only_reports(launch: Launch) -> None:
    words = ("--nproc-per-node", "1", "--preflight-paths", UNWRITABLE, "--preflight", "report")
    job = launch(*words, source="print('ran')", fake_torch="")
    assert job.wait() == 0
    assert "pre-flight: checkpoints in /proc/self: cannot be written to" in job.stderr()
    assert "ran" in job.stdout()


# --- several -------------------------------------------------------------------------------------------

_RAN = "import os; print('world', os.environ['WORLD_SIZE'], flush=True)"


def node(launch: Launch, port: int, nnodes: str, script: Path, *words: str) -> Launched:
    where = ("--nnodes", nnodes, "--rendezvous", f"127.0.0.1:{port}", "--rdzv-id", f"job-{port}")
    return launch(*where, "--nproc-per-node", "1", *words, str(script), env=BARE)


def test_a_job_runs_without_the_node_that_failed(launch: Launch, port: int, tmp_path: Path) -> None:
    """The fit one holds the job open until the other has been told that it sits out."""
    script = tmp_path / "train.py"
    script.write_text(
        f"{_RAN}\nimport time\nwhile not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.01)\n"
    )
    fit = node(launch, port, "1:2", script, "--last-call", "0")
    eventually(lambda: "world 1" in fit.stdout() or fit.agent.poll() is not None, what="the fit node runs")
    unfit = node(launch, port, "1:2", script, "--last-call", "0", "--preflight-paths", UNWRITABLE)
    eventually(lambda: "is excluded: it failed its health check: checkpoints in /proc/self" in unfit.stderr())
    (fit.there / "go").touch()
    assert fit.wait() == 0, fit.stderr()
    assert unfit.wait() == 0, unfit.stderr()
    assert "pre-flight: checkpoints in /proc/self: cannot be written to" in unfit.stderr()
    assert not unfit.stdout()


def test_nodes_meet_measure_and_then_run(launch: Launch, port: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RAN)
    nodes = [node(launch, port, "2", script, "--preflight", "full") for _ in range(2)]
    assert [each.wait() for each in nodes] == [0, 0], [each.stderr() for each in nodes]
    for each in nodes:
        assert "measuring the links between 2 nodes in 1 rounds" in each.stderr()
        assert "world 2" in each.stdout()
        each.assert_nothing_left()


@pytest.mark.nightly(instead="::test_nodes_meet_measure_and_then_run")
def test_doctors_meet_whatever_an_earlier_meeting_was_called(port: int) -> None:
    words = ("--json", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}")
    command = (sys.executable, "-m", "launcher", "doctor", *words)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=os.environ | BARE, **streams) for _ in range(2)]
    told = [each.communicate(timeout=100) for each in both]
    reports = [json.loads(out) for out, _ in told]
    assert [each.returncode for each in both] == [report["exit_code"] for report in reports]
    for report, (_, said) in zip(reports, told, strict=True):
        assert graded(report)["links"] == "skipped", said  # both are on this host
        assert graded(report)["same on all nodes"] == "ok"
        assert graded(report)["clock"] == "ok"


def test_nodes_whose_software_differs_all_say_so_and_run(launch: Launch, port: int, tmp_path: Path) -> None:
    (tmp_path / "older" / "torch").mkdir(parents=True)
    (tmp_path / "older" / "torch" / "__init__.py").touch()
    (tmp_path / "older" / "torch" / "version.py").write_text("__version__ = '2.4.0'\n")
    where = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--rdzv-id", f"job-{port}")
    words = (*where, "--nproc-per-node", "1", "--no-python", "true")
    others = [launch(*words, env=env) for env in ({}, {"PYTHONPATH": str(tmp_path / "older")})]
    assert [each.wait() for each in others] == [0, 0], [each.stderr() for each in others]
    for each in others:
        assert "ddp-launch: the nodes have different software: " in each.stderr()
        assert "torch 2." in each.stderr()
