"""Failures and what follows them: restarts, their limits, the exit code, the box and its JSON."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY, eventually

if TYPE_CHECKING:
    from launched import Launch, Launched

PLAIN = ("--no-warm-start", "--nproc-per-node", "2")
RANK_0_STAYS = FAMILY + "if os.environ['RANK'] == '0': there('rank'); signal.pause()\n"


# --- how many ----------------------------------------------------------------------------------------


def test_generations_count_up_and_each_has_a_store_of_its_own(launch: Launch, tmp_path: Path) -> None:
    source = (
        "import os, sys, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "e = os.environ\n"
        "port, count, gen = e['MASTER_PORT'], e['TORCHELASTIC_RESTART_COUNT'], e['DDP_GENERATION']\n"
        "with open(e['SEEN'], 'a') as f: f.write(f'{gen} {count} {e[\"RANK\"]} {port}\\n')\n"
        "dist.barrier()\n"
        "passed = os.path.join(e['THERE'], count)\n"  # by the other rank, too: nothing is lost to it then
        "if e['RANK'] == '0': open(passed, 'w').close()\n"
        "while not os.path.exists(passed): time.sleep(0.001)\n"
        "sys.exit(3 if count != '2' and e['RANK'] == '1' else 0)\n"
    )
    seen = tmp_path / "seen"
    job = launch("--nproc-per-node", "2", "--max-restarts", "3", source=source, env={"SEEN": str(seen)})
    assert job.wait() == 0, job.stderr()
    rows = sorted(line.split() for line in seen.read_text().splitlines())
    assert [row[:3] for row in rows] == [[str(g), str(g - 1), str(r)] for g in (1, 2, 3) for r in (0, 1)]
    ports = [row[3] for row in rows]
    assert all(ports[i] == ports[i + 1] for i in (0, 2, 4))
    assert len(set(ports)) == 3
    told = [line for line in job.stderr().splitlines() if "restarting with the same nodes" in line]
    assert len(told) == 2, told
    assert not job.logs()


@pytest.mark.parametrize(
    ("options", "generations", "code"),
    [
        (("--max-restarts", "2/1h", "--crash-loop", "off"), 3, 3),
        (("--max-restarts", "9", "--crash-loop", "3/60s", "--reserved-exit-codes", "3,79"), 3, 79),
    ],
    ids=["budget", "crash loop"],
)
def test_limits(launch: Launch, options: tuple[str, ...], generations: int, code: int) -> None:
    source = RANK_0_STAYS + "sys.exit(3)\n"
    job = launch(*PLAIN, *options, source=source)
    assert job.wait() == code
    (logs,) = job.logs()
    assert len(list(logs.glob("generation_*"))) == generations
    told = job.failure()
    assert told["exit_code"] == code
    assert told["restarts"] == generations - 1
    assert [each["kind"] for each in told["decisions"]] == ["restart"] * (generations - 1) + ["fail"]
    assert " ".join(told["reason"].split()) in job.said()
    job.assert_nothing_left(0.0)


def test_a_rank_that_asks_to_leave_out_the_only_node_is_told_that_it_stays(launch: Launch) -> None:
    """Although the rank ends at once: the agent reads the request before it reports the end."""
    source = "import ddp, sys\nddp.exclude_node('wrong\\nnumbers')\nsys.exit(3)\n"
    job = launch("--no-warm-start", "--nproc-per-node", "1", source=source)
    assert job.wait() == 3
    words = "no other node can take over from {}, so the job continues with it ({})"
    asked = "rank 0 asks to leave this node out: wrong numbers"
    assert words.format(job.failure()["first_cause"]["node"], asked) in job.stderr()


def test_a_job_that_does_not_get_further_ends_however_long_it_runs(launch: Launch) -> None:
    source = "import os, sys, ddp\nddp.status('training', step=7)\nsys.exit(3)\n"
    options = (
        "--max-restarts",
        "9/1h",
        "--crash-loop",
        "3/0s,3/step",
    )  # no time is short enough for the first rule
    job = launch("--no-warm-start", "--nproc-per-node", "1", *options, source=source)
    assert job.wait() == 79
    told = job.failure()
    assert told["restarts"] == 2
    assert told["reason"].startswith("the job failed 3 times in a row without getting beyond step 7; ")
    assert " ".join(told["reason"].split()) in job.said()


# --- whose code, whose cause -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
        ("raise ValueError('bad batch')", 1, "ValueError: bad batch"),
    ],
)
def test_exit_code_and_cause(launch: Launch, ending: str, code: int, words: str) -> None:
    job = launch(*PLAIN, source=RANK_0_STAYS + ending)
    assert job.wait() == code
    told = job.failure()
    assert (told["exit_code"], told["first_cause"]["rank"]) == (code, 1)
    assert words in told["first_cause"]["reason"]
    (logs,) = job.logs()
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    assert "Exception ignored" not in job.stderr()


def test_a_rank_that_ended_well_early_does_not_hide_a_later_failure(launch: Launch) -> None:
    source = FAMILY + (
        "if os.environ['RANK'] == '0': there('done'); sys.exit(0)\n"
        "while not os.path.exists(os.environ['THERE'] + '/done-0'): time.sleep(0.001)\n"
        "sys.exit(4)\n"
    )
    job = launch(*PLAIN, "--max-restarts", "1", source=source)
    assert job.wait() == 4
    assert job.failure()["first_cause"]["rank"] == 1


def test_an_exception_that_the_script_has_handled_is_not_the_reason(launch: Launch) -> None:
    source = RANK_0_STAYS + (
        "import traceback\n"
        "try: raise ConnectionRefusedError('tracking server')\n"
        "except OSError: traceback.print_exc()\n"
        "sys.exit('no checkpoint found in /data')\n"
    )
    job = launch("--nproc-per-node", "2", source=source, fake_torch="")
    assert job.wait() == 1
    told = job.failure()["first_cause"]
    assert told["class"] == "exit-code"
    assert told["traceback"].startswith("last lines on stderr, which may show why:\n")
    assert told["reason"].endswith('"no checkpoint found in /data")')


def test_program_that_cannot_be_executed(launch: Launch, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    job = launch("--nproc-per-node", "2", "--no-python", str(program))
    assert job.wait() == 127
    assert "cannot start" in job.stderr()
    job.assert_nothing_left(0.0)


# --- many --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warm", "last"),
    [
        (True, 20),
        pytest.param(False, 16, marks=pytest.mark.nightly),
    ],
)
def test_many_restarts_leak_nothing(launch: Launch, warm: bool, last: int) -> None:
    source = FAMILY + (
        "generation = int(os.environ['DDP_GENERATION'])\n"
        f"if generation in (8, {last}):\n"
        "    there(f'generation-{generation}')\n"
        "    while not os.path.exists(f\"{os.environ['THERE']}/go-{generation}\"): time.sleep(0.001)\n"
        f"sys.exit(generation < {last})\n"
    )
    how = () if warm else ("--no-warm-start",)
    job = launch(
        *how,
        "--max-restarts",
        "1000",
        "--crash-loop",
        "off",
        "--nproc-per-node",
        "2",
        source=source,
        fake_torch="",
    )
    before: list[dict[str, int]] = []
    for generation in (8, last):
        job.await_there(f"generation-{generation}-0", f"generation-{generation}-1", timeout_s=200)
        eventually(lambda: len(job.processes()) == 2 + (3 if warm else 2))
        job.await_journals()
        before = before or sizes_of(job)
        eventually(partial(is_no_larger, job, before), what=f"as before: {before}, {sizes_of(job)}")
        (job.there / f"go-{generation}").touch()
    assert job.wait() == 0, job.stderr()[-2000:]
    job.assert_nothing_left(0.0)


def sizes_of(job: Launched) -> list[dict[str, int]]:
    return [size_of(pid) for pid in (job.agent.pid, job.zygote())]


def is_no_larger(job: Launched, before: list[dict[str, int]]) -> bool:
    """A thread or a file that was there for a moment is not there at the next look. What leaks is."""
    spare = {"threads": 0, "files": 2, "kb": 2047}
    pairs = zip(sizes_of(job), before, strict=True)
    return all(new[kind] <= old[kind] + spare[kind] for new, old in pairs for kind in spare)


def size_of(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "kb": int(status["RssAnon"].split()[0]),
    }
