"""Ctrl-C, and what ranks and their libraries can save before their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY, SOON_S

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

TWO = ("--nproc-per-node", "2")
SAVES = FAMILY + (
    "import atexit\n"
    "child('worker', stay)\n"
    "atexit.register(there, 'atexit')\n"
    "try:\n"
    "    stay('rank')\n"
    "except KeyboardInterrupt:\n"
    "    there('except')\n"
    "    worker = int(open(path_of('worker', os.environ['RANK'])).read())\n"
    "    if os.path.exists(f'/proc/{worker}'): there('worker-lives')\n"
    "    raise\n"
    "finally:\n"
    "    there('finally')\n"
)
# A helper as a tracking library has it: it outlives its rank, and then saves what it has in memory.
HELPER = FAMILY + (
    "def helper(name):\n"
    "    os.setsid()\n"
    "    rank = os.getppid()\n"
    "    there(name)\n"
    "    while os.getppid() == rank: time.sleep(0.01)\n"
    "    time.sleep(0.1); there('saved')\n"
    "child('helper', helper)\n"
    "child('session', session)\n"
)


@pytest.mark.parametrize("how", ["warm", "new interpreter", "in the background of a shell"])
def test_ctrl_c_runs_what_python_runs_on_an_interrupt(launch: Launch, how: str) -> None:
    words = TWO if how == "warm" else ("--no-warm-start", *TWO)
    background = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    job = launch(*words, source=SAVES, fake_torch="", **(background if "shell" in how else {}))
    job.await_there("rank-0", "rank-1", "worker-0", "worker-1")
    job.send(signal.SIGINT)
    assert job.wait() == 130
    saved = [f"{name}-{rank}" for name in ("except", "worker-lives", "finally", "atexit") for rank in (0, 1)]
    assert job.is_there(*saved)(), (sorted(os.listdir(job.there)), job.stderr())
    job.assert_nothing_left(0.0)


def test_a_rank_that_ignores_the_interrupt_gets_sigterm(launch: Launch) -> None:
    source = FAMILY + (
        "def term(*_): there('term'); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, lambda *_: there('int'))\n"
        "signal.signal(signal.SIGTERM, term)\n"
        "there('rank')\n"
        "while True: signal.pause()\n"
    )
    job = launch("--no-warm-start", *TWO, "--shutdown-timeout", "1", source=source)
    job.await_there("rank-0", "rank-1")
    job.send(signal.SIGINT)
    assert job.wait() == 130
    assert job.is_there("int-0", "int-1", "term-0", "term-1")(), sorted(os.listdir(job.there))


@pytest.mark.parametrize("options", [("--max-restarts", "1"), ()], ids=["restart", "fail"])
def test_a_detached_process_of_a_surviving_rank_saves_after_the_failure_of_another(
    launch: Launch, options: tuple[str, ...]
) -> None:
    """The rank itself ends at once. What it has sent to its helper is not lost."""
    source = HELPER + (
        "if os.environ['DDP_GENERATION'] == '2': os._exit(0)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not all(os.path.exists(path_of(name, 0)) for name in ('rank', 'helper')): time.sleep(0.01)\n"
        "    os._exit(7)\n"
        "stay('rank')\n"
    )
    job = launch("--no-warm-start", *TWO, *options, source=source)
    assert job.wait() == (0 if options else 7), job.stderr()
    assert job.is_there("saved-0")(), sorted(os.listdir(job.there))
    job.assert_nothing_left(0.0)  # nor the helper that would never end


def test_a_second_ctrl_c_does_not_wait_for_detached_processes(launch: Launch) -> None:
    source = HELPER.replace("time.sleep(0.1)", "time.sleep(5)") + "stay('rank')\n"
    job = launch("--no-warm-start", "--nproc-per-node", "1", source=source)
    job.await_there("rank-0", "helper-0", "session-0")
    job.hail(signal.SIGINT)
    assert job.agent.returncode == 130
    assert not job.is_there("saved-0")()
    job.assert_nothing_left(0.0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_agent_exists_ends_the_command_quietly(tmp_path: Path, signum: int) -> None:
    """The command reads its configuration from a pipe, so it waits until the test writes."""
    config = tmp_path / "config.toml"
    os.mkfifo(config)
    entry = "import sys, _ddp_launch_entry as entry; sys.exit(entry.ddp_launch())"
    words = (sys.executable, "-c", entry, "--config", str(config), "train.py")
    command = subprocess.Popen(words, stderr=subprocess.PIPE)
    with open(config, "w"):  # returns when the command has opened it, too
        command.send_signal(signum)
        _out, said = command.communicate(timeout=SOON_S)
    assert (command.returncode, said) == (128 + signum, b"")
