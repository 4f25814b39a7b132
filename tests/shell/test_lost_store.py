"""The process that keeps the ranks' store ends: the attempt fails at once, with the reason, and may be repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.exchange import Finish
from launcher.failure.ending import tell
from launcher.output.log_file import LogFolder
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from rendezvous.values.types import JobSpec, Outcome

if TYPE_CHECKING:
    from launched import Launch

# As a torch that cannot serve a socket that listens already.
CANNOT_SERVE = """
import torch.distributed as dist
def refuse(*_args, **_named):
    raise ValueError("this torch takes no listening socket")
dist.TCPStore.__init__ = refuse
"""
MEETS = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
# The keeper is the one child of the zygote that is no rank.
KILLS_KEEPER = """
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, os.getpid())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("went on", flush=True)
    sys.exit()
if dist.get_rank() == 0:
    with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as file:
        (keeper,) = {int(pid) for pid in file.read().split()} - set(ranks)
    os.kill(keeper, signal.SIGKILL)
signal.pause()
"""


@pytest.mark.nightly(
    instead=("shell/test_keepers.py", "::test_a_store_whose_process_is_killed_restarts_the_ranks")
)
def test_a_store_that_cannot_be_kept_ends_the_job_and_says_why(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text(CANNOT_SERVE)
    job = launch(
        *("--nproc-per-node", "2", "--max-restarts", "1", "--preload", "refusing"),
        source=MEETS,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert job.wait() == 75, job.stderr()
    cause = job.failure()["first_cause"]
    assert cause["reason"].endswith("has ended: ValueError: this torch takes no listening socket")
    assert job.stderr().count("restarting with the same nodes") == 1


def test_a_store_whose_process_is_killed_restarts_the_ranks(launch: Launch) -> None:
    words = (
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--no-learn-imports",
    )  # a trial import is a child, too
    job = launch(*words, source=KILLS_KEEPER)
    assert job.wait() == 0, job.stderr()
    assert job.stderr().count("restarting with the same nodes") == 1
    assert job.stdout().count("went on") == 2


def test_the_report_of_a_job_that_has_started_no_rank_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The store may end before the first rank starts. The box names the folder of the report all the same."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spec = LaunchSpec(EntryPoint(EntryKind.SCRIPT, "train.py"), JobSpec("run-1"), nproc=2)
    folder = LogFolder(spec)
    outcome = Outcome(False, "the store has ended", 75)
    kept: list[bool] = []
    assert tell(spec, folder, Finish(75, outcome.reason, outcome=outcome), kept.append, missing="") == 75
    assert kept == [False], "the logs were to be removed"
    assert "the store has ended" in capfd.readouterr().err
    assert json.loads((Path(folder.path) / "failure.json").read_text())["exit_code"] == 75
