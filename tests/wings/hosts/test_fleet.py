"""`--hosts` where every host is this one: no ssh is needed. tests/lab has the real thing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import Launched, eventually

if TYPE_CHECKING:
    from launched import Launch

BOTH = ("--hosts", "127.0.0.1:1,localhost:1")
SAYS = """
import os
print("here", os.environ["RANK"], flush=True)
open(os.path.join(os.environ["THERE"], "here-" + os.environ["RANK"]), "w").close()
"""
STAYS = SAYS + "import time\ntime.sleep(600)"
LINES = 40_000  # more than all buffers hold
FLOODS = f"print(*('x' * 100 for _ in range({LINES})), sep=chr(10))"


def agents(job: Launched) -> list[int]:
    text = Path(f"/proc/{job.agent.pid}/task/{job.agent.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def test_hosts_from_the_environment_are_not_for_their_agents(launch: Launch) -> None:
    """Each of them would start all hosts again, and so on."""
    job = launch("--no-warm-start", source=SAYS, env={"DDP_LAUNCH_HOSTS": BOTH[1]})
    assert job.wait() == 0, job.stderr()
    assert sorted(line.split("] ")[1] for line in job.stdout().splitlines()) == ["here 0", "here 1"]


def test_a_slow_reader_gets_everything(launch: Launch) -> None:
    reader, writer = os.pipe()
    job = launch("--no-warm-start", *BOTH, source=FLOODS, stdout=writer)
    os.close(writer)
    lines = 0
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while piece := stream.read(4096):  # less than there is at any time: the writer always waits
            lines += piece.count(b"\n")
    assert job.wait() == 0, job.stderr()
    assert lines == 2 * LINES


@pytest.mark.nightly(instead="::test_ctrl_c_up_to_its_last_moment_changes_nothing")
def test_ctrl_c_and_another_end_the_wait_for_a_reader(launch: Launch) -> None:
    source = SAYS + FLOODS
    reader, writer = os.pipe()
    job = launch("--no-warm-start", *BOTH, "--shutdown-timeout", "600", source=source, stdout=writer)
    os.close(writer)
    job.await_there("here-0", "here-1")
    job.send(signal.SIGINT)
    eventually(lambda: "SIGINT" in job.stderr())
    job.send(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT, job.stderr()
    os.close(reader)
    eventually(lambda: not job.processes(), what="nothing is left")


@pytest.mark.nightly(
    instead="shell/test_logs.py::test_lines_that_a_full_disk_does_not_take_are_told_of_on_the_other_stream"
)
def test_lines_that_a_full_disk_does_not_take_are_counted_for_all_hosts(launch: Launch) -> None:
    with open("/dev/full", "w") as full:
        # Nor is a word said about the machine, which others use as well.
        job = launch("--no-warm-start", "--preflight", "off", *BOTH, source=SAYS, stdout=full)
    assert job.wait() == 0, job.stderr()
    words = "standard output could not be written (No space left on device): 2 lines missing in this output"
    assert job.stderr() == f"ddp-launch: {words}\n"


def test_a_host_whose_agent_is_lost_is_named_and_nobody_waits_for_it(launch: Launch) -> None:
    job = launch(
        "--no-warm-start", *BOTH, "--max-restarts", "3", "--replacement-timeout", "600", source=STAYS
    )
    job.await_there("here-0", "here-1")
    os.kill(agents(job)[1], signal.SIGKILL)
    assert job.wait() == 1, "before --replacement-timeout: nobody can replace it"
    assert "ddp-launch: error: localhost: its agent ended with exit code -9" in job.stderr()
    job.assert_nothing_left()


def test_a_host_that_cannot_start_is_named_and_nobody_waits_for_it(launch: Launch) -> None:
    job = launch("--hosts", "127.0.0.1:1,localhost", "--nproc-per-node", "gpu", source=STAYS)
    assert job.wait() == 1
    assert "ddp-launch: error: localhost: its agent ended with exit code 2" in job.stderr()
    job.assert_nothing_left()


def test_a_script_that_speaks_as_its_agent_does_no_harm(launch: Launch) -> None:
    source = 'print(\'\\x1e\' + \'{"kind": "ending", "text": [1]}\', flush=True)'
    job = launch("--no-warm-start", "--log-prefix=", *BOTH, source=source)
    assert job.wait(50) == 0, job.stderr()


def test_without_ssh_there_is_one_clear_line(launch: Launch) -> None:
    job = launch("--hosts", "192.0.2.1", "--ssh", "no-such-ssh -T", source=SAYS)
    assert job.wait() == 1
    said = "192.0.2.1: the ssh connection failed: no-such-ssh: No such file or directory"
    assert job.stderr() == f"ddp-launch: error: {said} [DDP-4007]\n"


HANGS = ("--ssh", "sh -c 'exec sleep 600' ssh", "--hosts", "127.0.0.1:1,192.0.2.1:1")


@pytest.mark.nightly(instead="::test_a_host_whose_ssh_hangs_does_not_outlast_a_job_that_can_do_without_it")
def test_a_host_whose_ssh_hangs_is_waited_for_as_long_as_a_node(launch: Launch) -> None:
    job = launch("--no-warm-start", *HANGS, "--join-timeout", "2", source=SAYS)
    assert job.wait() == 1
    assert (
        "ddp-launch: error: 192.0.2.1: its agent did not connect within 2 s (--join-timeout)" in job.stderr()
    )
    job.assert_nothing_left()


def test_a_host_whose_ssh_hangs_does_not_outlast_a_job_that_can_do_without_it(launch: Launch) -> None:
    job = launch("--no-warm-start", *HANGS, "--nnodes", "1:2", "--last-call", "0.1", source=SAYS)
    assert job.wait() == 0, job.stderr()
    assert "192.0.2.1: the job ended before" in job.stderr()
    job.assert_nothing_left()


@pytest.mark.nightly(
    instead=(
        "shell/test_signals.py::test_nohup_keeps_the_job_running",
        "::test_ctrl_c_up_to_its_last_moment_changes_nothing",
    )
)
def test_nohup_survives_the_terminal_and_ctrl_c_stops_all(launch: Launch) -> None:
    def ignore_hangups() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    job = launch("--no-warm-start", *BOTH, source=STAYS, preexec_fn=ignore_hangups)
    job.await_there("here-0", "here-1")
    job.send(signal.SIGHUP)
    job.send(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT, job.stderr()
    assert "SIGHUP" not in job.stderr()
    job.assert_nothing_left()


@pytest.mark.nightly(instead="::test_ctrl_c_up_to_its_last_moment_changes_nothing")
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(launch: Launch) -> None:
    for delay in ("0.05", "0.15", "0.3"):
        job = launch(*BOTH, source=STAYS)
        subprocess.run(["sleep", delay], check=True)  # chance decides what is met: all of it must be well
        job.send(signal.SIGINT)
        eventually(lambda job=job: job.agent.poll() is not None or "Exception ignored in" in job.stderr())
        job.send(signal.SIGINT)  # Python passes over one that it meets in a callback of an import
        code = job.wait()
        said = job.stderr()
        too_early = "KeyboardInterrupt" in said and "launcher/" not in said  # Python ends itself
        assert too_early or code in (128 + signal.SIGINT, -signal.SIGINT), job.stderr()
        eventually(lambda job=job: not job.processes(), what="nothing is left")


def test_ctrl_c_up_to_its_last_moment_changes_nothing(launch: Launch) -> None:
    job = launch("--no-warm-start", *BOTH, source=STAYS)
    job.await_there("here-0", "here-1")
    assert job.hail(signal.SIGINT) == 128 + signal.SIGINT, job.stderr()
    tracebacks = [line for line in job.stderr().splitlines() if "Traceback" in line]
    assert all(line.startswith("[") for line in tracebacks)  # of ranks: KeyboardInterrupt
    eventually(lambda: not job.processes(), what="nothing is left")
