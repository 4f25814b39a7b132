"""Ranks are asked for a checkpoint: before their node goes, and before their world grows."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from launched import eventually

from launcher.template import cgroup, scratch

if TYPE_CHECKING:
    import pytest
    from launched import Launch, Launched

# Trains until told to stop; takes every checkpoint that it is asked for, if OBLIGING.
TRAIN = """
import os, time
request, rank = os.environ["DDP_CHECKPOINT_REQUEST"], os.environ["RANK"]
generation, size = os.environ["DDP_GENERATION"], os.environ["WORLD_SIZE"]
assert request == f"{os.environ['DDP_SCRATCH']}/checkpoint-{generation}"

def say(name, text):
    path = os.path.join(os.environ["THERE"], name)
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)

say(f"{generation}-{rank}", f"{size} {request}")
taken = 0
while not os.path.exists(os.environ["FINISH"]):
    answered = os.path.exists(f"{request}.done.{rank}")  # looked at first: it goes after the question
    if os.path.exists(request) and os.environ.get("OBLIGING") and not answered:
        taken += 1
        say(f"taken-{generation}-{rank}-{taken}", open(request).read())
        open(f"{request}.done.{rank}", "w").close()
    time.sleep(0.01)
"""


def start(launch: Launch, folder: Path, *words: str, obliging: str = "1") -> Launched:
    env = {"FINISH": str(folder / "finish"), "OBLIGING": obliging}
    script = folder / "train.py"
    script.write_text(TRAIN)
    return launch("--nproc-per-node", "2", *words, str(script), env=env, fake_torch="")


def scratch_of(job: Launched) -> Path:
    return Path((job.there / "1-0").read_text().split(maxsplit=1)[1]).parent


def test_a_signal_asks_for_a_checkpoint_and_the_job_goes_on(launch: Launch, tmp_path: Path) -> None:
    job = start(launch, tmp_path, "--checkpoint-signal", "USR1", "--checkpoint-grace", "40")
    job.await_there("1-0", "1-1")
    scratch = scratch_of(job)
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    for number in (1, 2):
        job.send(signal.SIGUSR1)
        job.await_there(f"taken-1-0-{number}", f"taken-1-1-{number}")
        asked = json.loads((job.there / f"taken-1-0-{number}").read_text())
        assert asked == {"reason": "SIGUSR1: the scheduler will preempt this node", "deadline_s": 40.0}
        eventually(
            lambda: not list(scratch.glob("checkpoint-*")), what="it is closed, and may be asked again"
        )
    (tmp_path / "finish").touch()
    assert job.wait() == 0
    job.assert_nothing_left()
    assert not scratch.exists()


def test_an_answer_counts_that_was_given_just_before_the_question_and_an_old_one_does_not(
    launch: Launch, tmp_path: Path
) -> None:
    """Ranks agree among themselves, and another node may have been asked before."""
    words = ("--checkpoint-signal", "SIGTERM", "--checkpoint-grace", "300")
    job = start(launch, tmp_path, *words, obliging="")
    job.await_there("1-0", "1-1")
    answers = [scratch_of(job) / f"checkpoint-1.done.{rank}" for rank in (0, 1)]
    for answer in answers:
        answer.touch()
    os.utime(answers[1], (1.0, 1.0))
    job.send(signal.SIGTERM)
    eventually(lambda: not answers[1].exists(), what="the old answer is taken away")
    assert answers[0].exists()
    assert job.agent.poll() is None
    answers[1].touch()
    assert job.wait() == 143


def test_a_stop_signal_waits_for_the_checkpoint_and_no_longer(launch: Launch, tmp_path: Path) -> None:
    job = start(launch, tmp_path, "--checkpoint-signal", "SIGTERM", "--checkpoint-grace", "300")
    job.await_there("1-0", "1-1")
    job.send(signal.SIGTERM)
    assert job.wait() == 143, "at once, not after the grace"
    assert job.is_there("taken-1-0-1", "taken-1-1-1")()
    assert "SIGTERM: requesting a checkpoint" in job.stderr()
    job.assert_nothing_left()


def test_ranks_that_do_not_answer_have_the_grace_and_a_second_signal_ends_it(
    launch: Launch, tmp_path: Path
) -> None:
    words = ("--checkpoint-signal", "SIGTERM", "--checkpoint-grace")
    late = start(launch, tmp_path, *words, "0.5", obliging="")
    impatient = start(launch, tmp_path, *words, "300", obliging="")
    for job in (late, impatient):
        job.await_there("1-0", "1-1")
        job.send(signal.SIGTERM)
    eventually(lambda: "requesting a checkpoint" in impatient.stderr())
    impatient.send(signal.SIGTERM)
    assert (late.wait(), impatient.wait()) == (143, 143)
    for job in (late, impatient):
        job.assert_nothing_left()


def test_the_scratch_folder_goes_with_an_agent_that_is_killed(launch: Launch, tmp_path: Path) -> None:
    job = start(launch, tmp_path)
    job.await_there("1-0", "1-1")
    scratch = scratch_of(job)
    (scratch / "elastic").mkdir()
    (scratch / "elastic" / "commit").write_text("a rank's")
    job.send(signal.SIGKILL)
    eventually(lambda: not scratch.exists(), what="the zygote cleans up")
    job.wait()


def test_what_two_kills_at_once_left_behind_goes_with_the_next_job(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, running = start(launch, tmp_path), start(launch, tmp_path)
    for job in (killed, running):
        job.await_there("1-0", "1-1")
    left, used = scratch_of(killed), scratch_of(running)
    (left / "commit").write_text("a rank's")
    zygote = killed.zygote()
    for pid in (zygote, killed.agent.pid):  # the zygote first, and neither has the time to answer
        os.kill(pid, signal.SIGSTOP)
    for pid in (zygote, killed.agent.pid):
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    eventually(lambda: not killed.processes())
    assert left.exists()
    scratch.remove_left_behind(str(used))
    assert left.exists(), "so young that its zygote may be about to lock it"
    monkeypatch.setattr(scratch, "_YOUNG_S", 0.0)
    for folder in (left, used):  # of these two alone: another test's may be young indeed
        monkeypatch.setattr(scratch, "PREFIX", folder.name)
        scratch.remove_left_behind(str(used.parent / "another"))
    assert not left.exists()
    assert used.exists(), "its lock is held"
    if running.has_cgroup():  # the system permits it

        def is_removed() -> bool:
            cgroup.remove_left_behind(running.cgroup())
            return not os.path.exists(killed.cgroup())

        eventually(is_removed)  # the kernel refuses while the last member is in its exit
        assert running.has_cgroup(), "it has members"
    (tmp_path / "finish").touch()
    assert running.wait() == 0
    assert not used.exists()
