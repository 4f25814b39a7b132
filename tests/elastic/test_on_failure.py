"""`ddp.on_failure`: survivors save the last step of a loop of the user, and the next generation goes on from it."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launched import Launched, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "programs" / "own_loop.py"
NIGHTLY = pytest.mark.nightly(instead="::test_no_more_than_the_interrupted_step_is_lost")


class Said:
    def __init__(self, job: Launched) -> None:
        self.job = job

    def of(self, what: str) -> list[dict[str, Any]]:
        files = sorted(self.job.there.glob("said-*"))
        lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return sorted((line for line in lines if line["what"] == what), key=lambda line: line["generation"])

    def result(self) -> tuple[str, list[float]]:
        ends = [(line["digest"], line["rate"]) for line in self.of("ends")]
        assert ends, self.job.stderr()
        assert all(each == ends[0] for each in ends)
        return ends[0]

    def begun(self) -> list[int]:
        """The first step of each generation, on which all ranks agree."""
        found: dict[int, set[int]] = {}
        for line in self.of("begins"):
            found.setdefault(line["generation"], set()).add(line["step"])
        assert all(len(steps) == 1 for steps in found.values()), found
        return [steps.pop() for steps in found.values()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    jobs: list[Launched] = []

    def begin(*words: str, **plan: Any) -> Launched:
        plan = {"steps": 12} | plan
        options = ("--nproc-per-node", "2", "--max-restarts", "3", "--preload", "torch._dynamo")
        env = {"PLAN": json.dumps(plan)}
        jobs.append(Launched(tmp_path / f"job{len(jobs)}", *options, *words, str(PROGRAM), env=env))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


@pytest.fixture
def play(start: Callable[..., Launched]) -> Callable[..., Said]:
    def played(*words: str, code: int = 0, **plan: Any) -> Said:
        job = start(*words, **plan)
        assert job.wait() == code, job.stderr()
        return Said(job)

    return played


def death(rank: int, step: int, when: str | float) -> dict[str, Any]:
    return {"rank": rank, "step": step, "when": when}


def test_no_more_than_the_interrupted_step_is_lost(play: Callable[..., Said]) -> None:
    calm = play()
    deaths = {"1": death(1, 3, "backward"), "2": death(0, 6, "stepping"), "3": death(1, 9, "between")}
    said = play("--resume-arg", "--ckpt {path}", die=deaths)
    assert said.result() == calm.result()
    # In the second and third generation all gradients were reduced: the survivor has finished one step more.
    assert said.begun() == [0, 3, 7, 10]
    assert [line["rank"] for line in said.of("saves")] == [0, 1, 0]
    assert all("killed by SIGKILL" in line["reason"] for line in said.of("saves"))


@NIGHTLY
@pytest.mark.parametrize("model", ["torch", "ours"])
@pytest.mark.parametrize("seed", range(5))
def test_deaths_at_random_instants(play: Callable[..., Said], model: str, seed: int) -> None:
    draw = random.Random(seed)
    calm = play(model=model, steps=24)
    deaths = {
        str(number + 1): death(draw.randrange(2), draw.randrange(1, 23), draw.uniform(0, 0.01))
        for number in range(3)
    }
    said = play(model=model, steps=24, die=deaths)
    assert said.result() == calm.result(), deaths


@NIGHTLY
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "save(reason) failed, so nothing was saved: ValueError: the disk is full"),
        ("hangs", "no state was saved within 2 s"),
        ("says nothing", "it returned None instead of a path"),
    ],
)
def test_a_function_that_fails_is_said_and_the_job_restarts_without(
    play: Callable[..., Said], fault: str, words: str
) -> None:
    said = play(save=fault, limit_s=2.0, die={"1": death(1, 3, "backward")})
    assert words in said.job.stderr()
    assert said.begun() == [0, 0]
    assert [line["path"] for line in said.of("begins")] == [None] * 4
    assert len(said.of("saves")) == 1


@NIGHTLY
def test_a_hang_that_is_broken_off(play: Callable[..., Said]) -> None:
    calm = play()
    said = play("--hang-timeout", "2", die={"1": death(1, 3, "hang")})
    assert said.result() == calm.result()
    assert said.begun() == [0, 3]


@NIGHTLY
def test_a_schedulers_signal(start: Callable[..., Launched]) -> None:
    job = start(stop_at=5, steps=100_000)
    said = Said(job)
    eventually(lambda: len(said.of("waits")) == 2)
    job.send(signal.SIGTERM)
    (job.there / "go-on").touch()
    assert job.wait() == 128 + signal.SIGTERM
    (saved,) = said.of("saves")
    assert saved["step"] >= 5
    assert f"saved the state after {saved['step']} steps" in job.stderr()
