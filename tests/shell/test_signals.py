"""Signals to the agent: what the ranks get of them, and how the job ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY, Launched, eventually

if TYPE_CHECKING:
    from launched import Launch

PLAIN = ("--no-warm-start", "--nproc-per-node", "2")
GRACE = "2"  # seconds in which a rank on a busy machine gets round to saying that it was asked
DEAF = FAMILY + (
    "for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, lambda *_: there('asked'))\n"
    "there('rank')\n"
    "while True:\n    signal.pause()\n"
)


@pytest.mark.parametrize(
    ("warm", "name"),
    [
        (False, "SIGINT"),
        (True, "SIGTERM"),
        *(
            pytest.param(warm, name, marks=pytest.mark.nightly)
            for warm in (False, True)
            for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
            if (warm, name) not in ((False, "SIGINT"), (True, "SIGTERM"))
        ),
    ],
)
def test_ranks_have_time_to_write_a_checkpoint(launch: Launch, name: str, warm: bool) -> None:
    """The rank is asked, its children are not: a DataLoader's workers must live while it finishes."""
    source = FAMILY + (
        "child('child', stay)\n"
        "def checkpoint(*_):\n"
        "    there('asked')\n"
        "    while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
        "    there('checkpoint'); sys.exit(0)\n"
        "for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, checkpoint)\n"
        "stay('rank')\n"
    )
    job = launch("--nproc-per-node", "2", *(() if warm else PLAIN), source=source, fake_torch="")
    job.await_there("rank-0", "rank-1", "child-0", "child-1")
    job.send(getattr(signal, name))
    job.await_there("asked-0", "asked-1")
    assert len(job.processes()) >= 1 + 1 + 4
    (job.there / "go").touch()
    assert job.wait() == 128 + getattr(signal, name)
    assert job.is_there("checkpoint-0", "checkpoint-1")()
    assert name in job.stderr()
    (folder,) = job.logs()
    assert str(folder) in job.stderr()
    job.assert_nothing_left(0.0)


@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_ranks_that_do_not_end_are_killed(launch: Launch, how: str) -> None:
    grace = GRACE if how == "grace" else "600"
    job = launch(*PLAIN, "--shutdown-timeout", grace, source=DEAF)
    job.await_there("rank-0", "rank-1")
    job.send(signal.SIGINT)
    job.await_there("asked-0", "asked-1")
    if how == "second signal":
        job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left(0.0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="fail"),
        pytest.param(("--max-restarts", "1"), id="restart", marks=pytest.mark.nightly),
    ],
)
def test_grace_is_the_same_when_a_rank_has_failed(launch: Launch, options: tuple[str, ...]) -> None:
    source = (
        FAMILY + "if os.environ['DDP_GENERATION'] == '2': sys.exit(0)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists(os.environ['THERE'] + '/rank-0'): time.sleep(0.001)\n"
        "    sys.exit(7)\n" + DEAF
    )
    job = launch(*PLAIN, *options, "--shutdown-timeout", GRACE, source=source)
    job.await_there("asked-0")
    assert job.wait() == (0 if options else 7), job.stderr()
    job.assert_nothing_left(0.0)


@pytest.mark.parametrize("options", [("--max-restarts", "1"), ()], ids=["restart", "fail"])
def test_signal_while_ranks_are_stopped_after_a_failure(launch: Launch, options: tuple[str, ...]) -> None:
    """Of a job that goes on it asks the end; of one that has failed, no more than to be quick about it."""
    source = (
        FAMILY + "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists(os.environ['THERE'] + '/rank-0'): time.sleep(0.001)\n"
        "    sys.exit(7)\n" + DEAF
    )
    job = launch(*PLAIN, *options, "--shutdown-timeout", "600", source=source)
    job.await_there("asked-0")
    job.send(signal.SIGINT)
    if options:
        job.send(signal.SIGTERM)
        assert job.wait() in (130, 143)
    else:
        assert job.wait() == 7
        cause = job.failure()["first_cause"]
        assert (cause["rank"], cause["exit_code"]) == (1, 7)
    job.assert_nothing_left(0.0)


def test_nohup_keeps_the_job_running(launch: Launch) -> None:
    """Its ranks do not ignore the signal, as under torchrun, which handles it itself."""
    source = FAMILY + (
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL\n"
        "there('rank')\nwhile not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
    )
    job = launch(*PLAIN, source=source, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.await_there("rank-0", "rank-1")
    job.send(signal.SIGHUP)
    (job.there / "go").touch()
    assert job.wait() == 0, job.stderr()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os.kill(os.getppid(), 15); os.kill(os.getppid(), 15)", "of local rank 1 received SIGTERM"),
        ("import subprocess; subprocess.run(['kill', str(os.getppid())])", "received SIGTERM"),
    ],
    ids=["rank", "command"],
)
def test_a_rank_that_signals_its_parent_stops_the_job(launch: Launch, how: str, words: str) -> None:
    """As under torchrun, where the parent is the launcher. Several such signals stop it once, and kill nothing."""
    source = FAMILY + (
        "def saved(*_): there('asked'); time.sleep(0.1); there('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, saved)\n"
        "there('rank')\n"
        "while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
        f"if os.environ['RANK'] == '1': {how}\n"
        "while True: time.sleep(1)\n"
    )
    job = launch(*PLAIN, source=source)
    job.await_there("rank-0", "rank-1")
    (job.there / "go").touch()
    assert job.wait() == 128 + signal.SIGTERM
    assert job.is_there("saved-0", "saved-1")()
    assert words in job.stderr()
    job.assert_nothing_left(0.0)


def test_user_signals_reach_the_ranks_and_the_job_goes_on(launch: Launch) -> None:
    source = FAMILY + (
        "signal.signal(signal.SIGUSR1, lambda *_: there('one'))\n"
        "signal.signal(signal.SIGUSR2, lambda *_: there('two'))\n"
        "there('rank')\n"
        "while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
    )
    job = launch("--nproc-per-node", "2", source=source, fake_torch="")
    job.await_there("rank-0", "rank-1")
    job.send(signal.SIGUSR1)
    job.await_there("one-0", "one-1")
    job.send(signal.SIGUSR2)
    job.await_there("two-0", "two-1")
    (job.there / "go").touch()
    assert job.wait() == 0, job.stderr()


def test_suspended_agent_harms_nothing(launch: Launch) -> None:
    source = FAMILY + (
        "there('rank')\nwhile not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
        "print('x' * 100); there('written')\n"
    )
    # SIGTSTP means nothing to a process group whose parents are all outside of its session.
    job = launch(*PLAIN, source=source, process_group=0)
    job.await_there("rank-0", "rank-1")
    job.send(signal.SIGTSTP)
    eventually(lambda: state_of(job.agent.pid) == "T")
    (job.there / "go").touch()
    job.await_there("written-0", "written-1")
    job.send(signal.SIGCONT)
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("x" * 100) == 2


@pytest.mark.parametrize(
    "name",
    ["SIGUSR1", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("SIGINT", "SIGTERM", "SIGHUP"))],
)
def test_signal_while_torch_is_imported_ends_at_once(launch: Launch, name: str) -> None:
    slow = "import os, time\nopen(os.environ['THERE'] + '/import', 'w').close()\ntime.sleep(60)\n"
    job = launch(source="", fake_torch=slow)
    job.await_there("import")
    job.send(getattr(signal, name))
    if name == "SIGUSR1":  # there is no rank yet that it could be meant for
        job.send(signal.SIGTERM)
        name = "SIGTERM"
    assert job.wait(30.0) == 128 + getattr(signal, name)
    job.assert_nothing_left(0.0)
    assert "Traceback" not in job.stderr()


EARLY = ((3, "SIGINT", True), (5, "SIGINT", False))


def at_each_moment() -> list[object]:
    """Some moments of both kinds of start; nightly each signal at each of them."""
    cases = [(n, name, warm) for n in range(2, 6) for name in ("SIGTERM", "SIGINT") for warm in (True, False)]
    return [
        pytest.param(n, name, warm, marks=[] if (n, name, warm) in EARLY else pytest.mark.nightly)
        for n, name, warm in cases
    ]


@pytest.mark.parametrize(("processes", "name", "warm"), at_each_moment())
def test_signal_while_it_starts(launch: Launch, processes: int, name: str, warm: bool) -> None:
    """As soon as so many processes are there, the agent, the zygote and the keeper among them."""
    job = launch("--nproc-per-node", "4", *(() if warm else PLAIN[:1]), source=DEAF, fake_torch="")
    eventually(lambda: len(job.processes()) >= processes)
    job.send(getattr(signal, name))
    job.send(getattr(signal, name))
    eventually(lambda: over(job, getattr(signal, name)))
    assert job.wait() == 128 + getattr(signal, name), job.stderr()
    assert not any(
        line.startswith("Traceback") for line in job.stderr().splitlines()
    )  # a rank may be interrupted
    job.assert_nothing_left(0.0)


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.nightly), "SIGINT"])
def test_signals_up_to_its_last_moment_change_nothing(launch: Launch, name: str) -> None:
    """Some come after it has decided how to end, while loops and threads are closed."""
    for _ in range(2):
        job = launch(*PLAIN, source=DEAF)
        job.await_there("rank-0", "rank-1")
        assert job.hail(getattr(signal, name)) == 128 + getattr(signal, name), job.stderr()
        assert "Traceback" not in job.stderr()


def over(job: Launched, signum: int) -> bool:
    """Two signals of a kind may arrive as one."""
    if job.agent.poll() is None and len(os.listdir(job.there)) > 0:
        job.send(signum)
    return job.agent.poll() is not None


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
