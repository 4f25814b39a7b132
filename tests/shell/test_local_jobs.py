"""ddpctl reaches a job on this machine that has no service, and only the jobs of its own user."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from launched import eventually

from rendezvous import local
from rendezvous.control.ctl import main

if TYPE_CHECKING:
    from launched import Launch

SCRIPT = """
import os, sys, time
def a_function_to_find():
    time.sleep(0.02)
print("a line of rank", os.environ["RANK"], flush=True)
while not os.path.exists(os.path.join(os.environ["THERE"], "over")):
    a_function_to_find()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.path.exists(os.path.join(os.environ["THERE"], "fail")):
        sys.exit(3)
"""


def ctl(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_job_without_a_service_is_found_asked_and_commanded(
    runtime: str, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preflight", "off")
    job = launch(*words, source=SCRIPT, fake_torch="", env={"XDG_RUNTIME_DIR": runtime})
    eventually(lambda: "a line of rank 1" in job.stdout() and "a line of rank 0" in job.stdout())

    def jobs() -> Any:
        return json.loads(ctl(capsys, "jobs", "-o", "json"))["jobs"]

    (found,) = jobs()
    assert (found["phase"], found["world_size"]) == ("PHASE_RUNNING", 2)
    assert "2 ranks on 1 node" in ctl(capsys, "top")
    eventually(lambda: "a_function_to_find" in ctl(capsys, "stacks", "1"))
    assert "a line of rank 0" in ctl(capsys, "logs", found["job_id"])
    (job.there / "fail").write_text("")
    eventually(lambda: "generation 2" in ctl(capsys, "top"))
    assert "verdict     exit-code: " in ctl(capsys, "why")
    assert "stopped" in ctl(capsys, "events", found["job_id"])
    assert main(["status", "another"]) == 75
    said = capsys.readouterr().err
    assert (
        f"the job 'another' is none of your jobs on this machine ({found['job_id']}), and no answer" in said
    )
    ctl(capsys, "abort", found["job_id"], "--reason", "enough")
    assert job.wait() == 143
    assert "enough" in job.stderr()
    assert local.endpoints() == []
    job.assert_nothing_left()


def test_what_a_killed_agent_leaves_is_removed(
    runtime: str, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch("--preflight", "off", source=SCRIPT, fake_torch="", env={"XDG_RUNTIME_DIR": runtime})
    eventually(lambda: "a line of rank 0" in job.stdout())
    assert len(local.endpoints()) == 1
    job.send(signal.SIGKILL)
    job.wait()
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "no jobs\n"
    assert main(["top"]) == 75
    assert (
        "no job of yours runs on this machine, and no answer from 127.0.0.1:29400" in capsys.readouterr().err
    )
    assert local.endpoints() == []


def test_a_folder_that_others_can_write_to_is_not_used(runtime: str) -> None:
    (folder,) = local._folders()
    os.mkdir(folder, 0o777)
    os.chmod(folder, 0o777)
    path = os.path.join(folder, "trap.job")
    open(path, "w").close()
    assert local.endpoints() == []
    assert local.endpoint_of("trap") == ""
    os.chmod(folder, 0o700)
    assert local.endpoint_of("trap") == f"unix:{folder}/trap.grpc"
    assert asyncio.run(local.wake(f"unix:{folder}/trap.grpc")) is False


@pytest.mark.parametrize("job_id", ["x" * 128, "a b", "..", "täglich"])
def test_a_name_that_is_no_file_name_gets_a_short_path(job_id: str) -> None:
    path = local._path("/run/user/1000/ddp-launch-jobs-1000", job_id)
    assert os.path.dirname(path) == "/run/user/1000/ddp-launch-jobs-1000"
    assert len(path) < 100


@pytest.mark.parametrize(
    ("chosen", "has_own"),
    [("near", True), ("", False), ("not-there", False), ("n" * 80, False), ("open", False)],
    ids=["set", "not set", "no folder", "too long for a socket", "open to others"],
)
def test_tools_look_where_agents_of_their_environment_listen(
    monkeypatch: pytest.MonkeyPatch, runtime: str, chosen: str, has_own: bool
) -> None:
    monkeypatch.undo()
    name = f"ddp-launch-jobs-{os.getuid()}"
    for base in ("shared", "near", "n" * 80, f"open/{name}"):
        os.makedirs(os.path.join(runtime, base))
    os.chmod(os.path.join(runtime, "open", name), 0o777)
    shared = os.path.join(runtime, "shared")
    monkeypatch.setattr(local, "_SHARED", shared)
    for base in ("near", ""):  # two agents: one in an environment with the folder, one without
        monkeypatch.setenv("XDG_RUNTIME_DIR", base and os.path.join(runtime, base))
        path = next(local._places(f"job-{base}"))
        open(f"{path}.job", "w").close()
    monkeypatch.setenv("XDG_RUNTIME_DIR", chosen and os.path.join(runtime, chosen))
    job, base = ("job-near", os.path.join(runtime, "near")) if has_own else ("job-", shared)
    assert local.endpoints() == [f"unix:{base}/{name}/{job}.grpc"]
    assert next(local._places("new")) == f"{base}/{name}/new"
    assert local.endpoint_of("job-") == f"unix:{shared}/{name}/job-.grpc"  # whose name is given
