"""`ddp.integrations` with the real frameworks: what a killed job computes is what an undisturbed one does, bit for bit.

accelerate is among our own requirements. Lightning and transformers are looked for in FRAMEWORKS (folders, separated by
colons, with any supported release), or else in the environment that `make .venv-unchanged/.installed` makes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launched import Launched, eventually

import ddp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "programs"
UNCHANGED = ROOT / ".venv-unchanged/lib/python{}.{}/site-packages".format(*sys.version_info)
NIGHTLY = pytest.mark.nightly(instead="::test_accelerate")
LIGHTNING, TRAINER, ACCELERATE = "lightning_fit.py", "trainer_train.py", "accelerate_loop.py"
STEPS = {LIGHTNING: 36, TRAINER: 24, ACCELERATE: 36}
ALL = pytest.mark.parametrize("program", [LIGHTNING, TRAINER, ACCELERATE])

_JOB_S = 220.0  # four times the start of a framework, on a machine that others use as well

pytestmark = pytest.mark.timeout(2 * _JOB_S + 60.0)  # most play two jobs

Losses = dict[tuple[int, int], float]


def environment(program: str) -> dict[str, str]:
    folders = os.environ.get("FRAMEWORKS") or str(UNCHANGED)
    if program != ACCELERATE and not all(Path(each).is_dir() for each in folders.split(":")):
        pytest.skip("its packages are not installed: make .venv-unchanged/.installed")
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": folders if program != ACCELERATE or "FRAMEWORKS" in os.environ else "",
    }


class Said:
    def __init__(self, job: Launched, there: Path | None = None) -> None:
        self.job, self._there = job, there or job.there

    def lines(self, what: str) -> list[dict[str, Any]]:
        files = sorted(self._there.glob("said-*"))
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [line for line in found if line["what"] == what]

    def result(self) -> tuple[str, Losses]:
        """The weights, and the loss of each step and rank: the last one, if a step was repeated."""
        digests = {line["digest"] for line in self.lines("ends")}
        assert len(digests) == 1, self.job.stderr()
        return digests.pop(), {(each["rank"], each["step"]): each["loss"] for each in self.lines("loss")}

    def begun(self) -> list[int]:
        """The first step of each generation after the first one."""
        lines = self.lines("loss")
        generations = sorted({line["generation"] for line in lines})[1:]
        return [min(each["step"] for each in lines if each["generation"] == one) for one in generations]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    jobs: list[Launched] = []

    def begin(program: str, *words: str, **plan: Any) -> Launched:
        folder = tmp_path / f"job{len(jobs)}"
        plan = {"folder": str(folder / "kept")} | plan
        env = environment(program) | {"PLAN": json.dumps(plan)}
        options = ("--nproc-per-node", "2", "--max-restarts", "4", *words)
        jobs.append(Launched(folder, *options, str(PROGRAMS / program), env=env))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


def played(job: Launched) -> Said:
    assert job.wait(_JOB_S) == 0, job.stderr()
    return Said(job)


def assert_the_same(said: Said, calm: Said) -> None:
    digest, losses = said.result()
    expected, all_losses = calm.result()
    assert digest == expected, said.job.stderr()
    assert losses.items() <= all_losses.items()
    # Of a step whose line was to come after the failure, there is none.
    assert len(all_losses) - len(losses) <= 2 * len(said.begun())


def death(rank: int, step: int | str, after_s: float) -> dict[str, Any]:
    return {"rank": rank, "step": step, "after_s": after_s}


def kill_and_compare(
    start: Callable[..., Launched], program: str, seed: int, n: int = 3, **plan: Any
) -> Said:
    draw = random.Random(seed)
    steps = STEPS[program] // plan.get("accumulate", 1)
    at = sorted(draw.sample(range(2, steps - 1), n))
    deaths = {str(1 + n): death(draw.randrange(2), step, draw.uniform(0, 0.01)) for n, step in enumerate(at)}
    calm = played(start(program, **plan))
    said = played(start(program, die=deaths, **plan))
    assert_the_same(said, calm)
    lost = [at[number] - first for number, first in enumerate(said.begun())]
    assert all(steps_lost <= 0 for steps_lost in lost), (deaths, said.begun(), said.job.stderr())
    return said


def test_accelerate(start: Callable[..., Launched]) -> None:
    kill_and_compare(start, ACCELERATE, 1, n=1, accumulate=2)


@NIGHTLY
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@ALL
def test_deaths_at_random_instants(
    start: Callable[..., Launched], program: str, seed: int, accumulate: int
) -> None:
    kill_and_compare(start, program, seed, accumulate=accumulate)


# In the first, second and third batch of an optimizer step, within the optimizer, and after it.
_POINTS = [
    (3, "begin"),
    (4, "forward"),
    (5, "backward"),
    (5, "optimizer"),
    (5, "stepped"),
    (4, "begin"),
    (3, "backward"),
]


@NIGHTLY
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("points", [_POINTS[:4], _POINTS[4:]])
@ALL
def test_deaths_at_each_point_of_an_accumulation(
    start: Callable[..., Launched], program: str, points: list[tuple[int, str]], holds: bool
) -> None:
    deaths = {
        str(1 + n): {"rank": n % 2, "batch": batch, "where": where, "holds": holds}
        for n, (batch, where) in enumerate(points)
    }
    calm = played(start(program, accumulate=3))
    said = played(start(program, accumulate=3, at=deaths))
    assert_the_same(said, calm)
    assert said.job.stderr().count("saved the state after") == len(points), said.job.stderr()


@NIGHTLY
@pytest.mark.parametrize("plan", [{"workers": 2}, {"validate_every": 3, "sanity": 2}])
def test_lightning_with_workers_and_validations(start: Callable[..., Launched], plan: dict[str, Any]) -> None:
    kill_and_compare(start, LIGHTNING, 5, **plan)


@NIGHTLY
@ALL
def test_a_schedulers_signal_becomes_a_checkpoint(
    start: Callable[..., Launched], tmp_path: Path, program: str
) -> None:
    calm = played(start(program))
    kept = tmp_path / "kept"
    job = start(program, "--resume-file", str(kept), stop_at=7)
    said = Said(job)
    eventually(lambda: len(said.lines("waits")) == 2)
    job.send(signal.SIGTERM)
    (job.there / "go-on").touch()
    assert job.wait() == 128 + signal.SIGTERM
    assert re.search(r"saved the state after \d+ steps", job.stderr()), job.stderr()
    folder = json.loads(job.env["PLAN"])["folder"]
    again = start(program, "--resume-file", str(kept), there=str(job.there), folder=folder)
    assert again.wait() == 0, again.stderr()
    assert_the_same(Said(again, job.there), calm)
    assert min(line["step"] for line in said.lines("loss")[-4:]) > 7


@NIGHTLY
@ALL
def test_the_status_shows_steps_loss_and_samples(start: Callable[..., Launched], program: str) -> None:
    job = start(program, "--rdzv-id", "shown", stop_at=12)
    eventually(lambda: len(Said(job).lines("waits")) == 2)

    def shown() -> str:
        words = [sys.executable, "-m", "rendezvous.control.ctl", "top", "shown", "--once"]
        return subprocess.run(words, env=job.env, capture_output=True, text=True, timeout=60).stdout

    text = eventually(lambda: (found := shown()) and "loss" in found and found)
    assert "step 12," in text
    assert program == TRAINER or "(rank 0, step 12)" in text
    assert program == ACCELERATE or "samples" in text
    (job.there / "go-on").touch()
    assert job.wait() == 0, job.stderr()


@NIGHTLY
@pytest.mark.parametrize("program", ["train_lightning.py", "train_transformers.py"])
def test_a_death_changes_nothing_of_an_example(tmp_path: Path, program: str) -> None:
    jobs = []
    for name, plan in (("calm", {}), ("killed", {"dies_after": 7})):
        (tmp_path / name).mkdir()
        env = environment(program)
        env |= {"PLAN": json.dumps(plan | {"example": str(ROOT / "examples" / program)})}
        words = ("--nproc-per-node", "2", "--max-restarts", "3", str(PROGRAMS / "example.py"))
        jobs.append(Launched(tmp_path / name / "job", *words, env=env, cwd=tmp_path / name))
    try:
        codes = [job.wait(_JOB_S) for job in jobs]
        said = [sorted(re.findall("weights .*", job.stdout())) for job in jobs]
        assert codes == [0, 0], jobs[1].stderr()
        assert len(said[0]) == 2
        assert said[0] == said[1], jobs[1].stderr()
        assert re.search(r"saved the state after [67] steps", jobs[1].stderr()), jobs[1].stderr()
    finally:
        for job in jobs:
            job.clean_up()


@NIGHTLY
def test_accelerate_with_loops_that_are_left_and_a_second_one(start: Callable[..., Launched]) -> None:
    """Two calls of `over` with 3 epochs each, and `break` after five of twelve batches, but not in the second epoch."""
    plan = {"calls": 2, "leaves_after": 4}
    calm = played(start(ACCELERATE, **plan))
    assert max(each["step"] for each in calm.lines("loss")) == 2 * (5 + 12 + 5) - 1
    places = ("evaluation 0", "evaluation 1", 19, "evaluation 0")  # the last one is in the second call
    deaths = {str(1 + n): death(n % 2, place, 0) for n, place in enumerate(places)}
    said = played(start(ACCELERATE, die=deaths, **plan))
    assert_the_same(said, calm)
    assert said.begun() == [5, 17, 19, 27]


def test_a_second_job_with_the_folder_of_another_is_told(start: Callable[..., Launched]) -> None:
    job = start(ACCELERATE, "--rdzv-id", "the-first", stop_at=2)
    eventually(lambda: len(Said(job).lines("waits")) == 2)
    second = start(ACCELERATE, folder=json.loads(job.env["PLAN"])["folder"])
    assert second.wait(_JOB_S) == 1
    assert re.search(r"the job the-first \(process \d+ on .*folder= in one", second.stderr()), second.stderr()
    (job.there / "go-on").touch()
    assert job.wait() == 0, job.stderr()


def test_what_cannot_be_attached_is_said() -> None:
    with pytest.raises(TypeError, match=r"does not know dict\. Use a Trainer of Lightning"):
        ddp.integrations.attach({})
    script = "from ddp.integrations import LightningCallback; LightningCallback()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert re.search(
        r'lightning is not imported. Import it before this call. .*pip install "lightning>=2.4"', done.stderr
    ), done.stderr
