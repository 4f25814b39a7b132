"""Nothing outlives the job, whoever dies first."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY, Launched, eventually
from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

MODES = {
    "warm": ("SCRIPT",),
    "plain": ("--no-warm-start", "SCRIPT"),
    "program": ("--no-python", sys.executable, "SCRIPT"),
}
WARM = ["warm", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("plain", "program"))]
ALL = [f"{name}-{rank}" for name in ("child", "deaf", "session", "daemon", "forking") for rank in (0, 1)]
EARLY = (("warm", 4), ("plain", 3))  # of the moments of a start, in every run
STAYS = FAMILY + "family(); stay('rank')\n"


def launch_family(launch: Launch, mode: str, source: str = STAYS, *options: str) -> Launched:
    return launch("--nproc-per-node", "2", *options, *MODES[mode], source=source, fake_torch="")


# --- the agent is killed -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WARM)
def test_killed_agent_leaves_nothing(launch: Launch, mode: str) -> None:
    job = launch_family(launch, mode)
    job.await_there("rank-0", "rank-1", *ALL)
    job.send(signal.SIGKILL)
    job.assert_nothing_left()


def test_killed_agent_leaves_nothing_while_torch_is_imported(launch: Launch) -> None:
    slow = "import os, time\nopen(os.environ['THERE'] + '/import', 'w').close()\ntime.sleep(60)\n"
    job = launch(source="", fake_torch=slow)
    job.await_there("import")
    job.send(signal.SIGKILL)
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("mode", "processes"),
    [
        pytest.param(mode, processes, marks=[] if (mode, processes) in EARLY else [pytest.mark.nightly])
        for mode in MODES
        for processes in range(1, 6)
    ],
)
def test_killed_agent_leaves_nothing_while_it_starts(launch: Launch, mode: str, processes: int) -> None:
    """Killed as soon as so many processes are there: itself, the zygote, a keeper, ranks."""
    job = launch_family(launch, mode, FAMILY + "stay('rank')", "--nproc-per-node", "4")
    eventually(lambda: len(job.processes()) >= processes)
    job.send(signal.SIGKILL)
    job.assert_nothing_left()


@pytest.mark.parametrize("mode", WARM)
def test_killed_agent_leaves_nothing_while_it_restarts(launch: Launch, mode: str) -> None:
    source = FAMILY + (
        "child('daemon', daemon); there('generation-' + os.environ['DDP_GENERATION']); sys.exit(1)\n"
    )
    job = launch_family(launch, mode, source, "--max-restarts", "1000000", "--crash-loop", "off")
    eventually(lambda: any(name.startswith("generation-5") for name in os.listdir(job.there)))
    job.send(signal.SIGKILL)
    job.assert_nothing_left()


@pytest.mark.parametrize("mode", WARM)
def test_killed_agent_leaves_nothing_while_it_stops(launch: Launch, mode: str) -> None:
    source = FAMILY + ("signal.signal(signal.SIGTERM, lambda *_: there('asked'))\nfamily(); stay('rank')\n")
    job = launch_family(launch, mode, source)
    job.await_there("rank-0", "rank-1", *ALL)
    job.send(signal.SIGTERM)
    job.await_there("asked-0", "asked-1")
    job.send(signal.SIGKILL)
    job.assert_nothing_left()


# --- a rank is killed --------------------------------------------------------------------------------

CLEANS = "import os, sys, time\nsys.stdin.read(); time.sleep(2); os.unlink(sys.argv[1])\n"


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_what_cleans_up_after_a_killed_rank_ends_by_itself(
    launch: Launch, tmp_path: Path, restarts: str
) -> None:
    """Torch's manager of shared memory waits 2 s after the end of the last process that has used it."""
    cleaner, file = tmp_path / "torch_shm_manager", tmp_path / "shared"
    cleaner.write_text(CLEANS)
    file.touch()
    source = (
        "import os, signal, subprocess, sys\n"
        "if os.environ['DDP_GENERATION'] == '2': sys.exit(0)\n"
        f"subprocess.Popen([sys.executable, {str(cleaner)!r}, {str(file)!r}], stdin=-1, start_new_session=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = launch("--max-restarts", restarts, source=source, fake_torch="")
    assert job.wait() == (0 if restarts == "1" else 137), job.stderr()
    eventually(lambda: not file.exists())
    job.assert_nothing_left()


# --- the zygote is killed ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WARM)
def test_job_restarts_when_the_zygote_is_killed(launch: Launch, mode: str) -> None:
    source = FAMILY + (
        "if os.environ['DDP_GENERATION'] == '1':\n    family(); stay('rank')\n"
        "if left_of_both_families(): sys.exit(9)\n"
        "there('second')\n"
    )
    job = launch_family(launch, mode, source, "--max-restarts", "1")
    job.await_there("rank-0", "rank-1", *ALL)
    os.kill(job.zygote(), signal.SIGKILL)
    assert job.wait() == 0, job.stderr()
    job.assert_nothing_left()
    assert job.is_there("second-0", "second-1")()
    assert re.search(r"zygote.* SIGKILL", job.stderr())


def test_job_fails_with_the_cause_when_the_zygote_is_killed(launch: Launch) -> None:
    job = launch_family(launch, "warm")
    job.await_there("rank-0", "rank-1", *ALL)
    os.kill(job.zygote(), signal.SIGKILL)
    assert job.wait() == 137, job.stderr()
    job.assert_nothing_left()
    cause = job.failure()["first_cause"]
    assert cause["class"] == "signal"
    assert "zygote" in cause["reason"]


@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(each, marks=pytest.mark.nightly) for each in (3, 4))]
)
def test_zygote_killed_early_is_replaced(launch: Launch, processes: int) -> None:
    """While it imports, idle, or with a keeper: whatever the moment, the ranks run in the end."""
    source = FAMILY + (
        "while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\nthere('ran')\n"
    )
    job = launch_family(launch, "warm", source, "--max-restarts", "3")
    eventually(lambda: len(job.processes()) >= processes and job.zygote())
    os.kill(job.zygote(), signal.SIGKILL)
    (job.there / "go").touch()
    assert job.wait() == 0, job.stderr()
    assert job.is_there("ran-0", "ran-1")()
    job.assert_nothing_left()


def test_crash_while_torch_is_imported_falls_back_to_a_plain_start(launch: Launch) -> None:
    # The keeper of the store imports torch too, in an interpreter of its own: it could not start either.
    abort = "import os, sys\nif 'RANK' not in os.environ and not sys.argv[0].endswith('store.py'):\n    os.abort()\n"
    job = launch("--nproc-per-node", "2", source=FAMILY + "there('ran')\nimport torch", fake_torch=abort)
    assert job.wait() == 0, job.stderr()
    assert job.is_there("ran-0", "ran-1")()
    said = [line for line in job.stderr().splitlines() if "warm start is not possible" in line]
    assert len(said) == 1
    assert "SIGABRT" in said[0]
    job.assert_nothing_left()


def test_zygotes_that_always_die_end_the_job(launch: Launch) -> None:
    """An interpreter that cannot even be started, say: not for ever. No rank runs meanwhile: a node is missing."""
    where = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--rdzv-id", "lonely")
    job = launch(*where, source="", fake_torch="")
    eventually(lambda: job.zygote())
    killed: set[int] = set()

    def kill_each() -> bool:
        if job.agent.poll() is not None:
            return True
        try:
            zygote = job.zygote()
        except OSError:
            return True
        if zygote and zygote not in killed:
            killed.add(zygote)
            os.kill(zygote, signal.SIGKILL)
        return False

    eventually(kill_each)
    assert job.wait() == 75, job.stderr()
    assert "cannot start ranks" in job.stderr()
    assert "Traceback" not in job.stderr()
    job.assert_nothing_left()


def test_ranks_die_with_both_agent_and_zygote(launch: Launch) -> None:
    job = launch_family(launch, "warm", FAMILY + "stay('rank')")
    job.await_there("rank-0", "rank-1")
    for pid in (job.zygote(), job.agent.pid):
        os.kill(pid, signal.SIGSTOP)
    for pid in (job.zygote(), job.agent.pid):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not job.processes())


# --- ranks end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WARM)
def test_what_a_successful_rank_leaves_behind_ends_with_the_job(launch: Launch, mode: str) -> None:
    source = FAMILY + (
        "family()\nwhile not all(os.path.exists(f\"{os.environ['THERE']}/{n}-{os.environ['RANK']}\")"
        " for n in NAMES):\n    time.sleep(0.001)\n"
    )
    job = launch_family(launch, mode, source)
    assert job.wait() == 0, job.stderr()
    assert job.is_there(*ALL)()
    job.assert_nothing_left(0.0)
    assert not job.logs()


@pytest.mark.parametrize("mode", WARM)
def test_shared_memory_of_a_rank_that_dies_at_once_is_removed(launch: Launch, mode: str) -> None:
    source = (
        "import multiprocessing, os, signal\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "if __name__ == '__main__':\n"
        "    memory = SharedMemory(create=True, size=64)\n"
        "    worker = multiprocessing.get_context('spawn').Pool(1)\n"
        "    worker.apply(os.getpid)\n"
        "    with open('/proc/self/maps') as maps:\n"
        "        paths = {line.split()[5] for line in maps if '/dev/shm/' in line}\n"
        "    for path in paths: open(os.path.join(os.environ['THERE'], os.path.basename(path)), 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = launch_family(launch, mode, source)
    assert job.wait() == 128 + signal.SIGKILL
    job.assert_nothing_left()
    names = os.listdir(job.there)
    assert len(names) > 1, "its memory, and the semaphores of the pool"
    assert not [name for name in names if os.path.exists(f"/dev/shm/{name}")]


@pytest.mark.parametrize("mode", WARM)
def test_descendants_are_dead_before_the_next_generation(launch: Launch, mode: str) -> None:
    """Each process of generation 1 leaves its pid; generation 2 looks whether any of them is there."""
    source = FAMILY + (
        "if os.environ['DDP_GENERATION'] == '1':\n"
        "    family()\n"
        "    while not all(os.path.exists(path_of(n, r)) for n in NAMES for r in (0, 1)):\n"
        "        time.sleep(0.001)\n"
        "    if os.environ['RANK'] == '1': sys.exit(5)\n"
        "    stay('rank')\n"
        "sys.exit(9 if left_of_both_families() else 0)\n"
    )
    job = launch_family(launch, mode, source, "--max-restarts", "1")
    assert job.wait() == 0, job.stderr()
    job.assert_nothing_left(0.0)
