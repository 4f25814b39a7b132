"""`ddp.on_failure`: survivors save the last step of a loop of the user, and the next generation goes on from it."""

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
from ports import free_port

import ddp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "programs" / "own_loop.py"
NIGHTLY = pytest.mark.nightly(instead="::test_no_more_than_the_interrupted_step_is_lost")


def lines(there: Path, what: str) -> list[dict[str, Any]]:
    found = [
        json.loads(line) for path in sorted(there.glob("said-*")) for line in path.read_text().splitlines()
    ]
    return sorted((line for line in found if line["what"] == what), key=lambda line: line["generation"])


def returns_nothing(_reason: str) -> None: ...


class Said:
    def __init__(self, job: Launched) -> None:
        self.job = job

    def of(self, what: str) -> list[dict[str, Any]]:
        return lines(self.job.there, what)

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
    assert all(line["reason"] for line in said.of("saves"))  # often that of the launcher


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
def test_a_closure_and_a_collective_after_the_step(play: Callable[..., Said]) -> None:
    calm = play(closure=True, reduces=True)
    deaths = {"1": death(1, 3, "backward"), "2": death(0, 6, "between"), "3": death(1, 9, "backward")}
    said = play(closure=True, reduces=True, die=deaths)
    assert said.result() == calm.result()
    assert said.begun() == [
        0,
        3,
        7,
        9,
    ]  # the survivor of the second death fails in the collective after its step


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
def test_a_schedulers_signal(start: Callable[..., Launched], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job = start("--resume-file", str(kept), stop_at=5, steps=100_000)
    said = Said(job)
    eventually(lambda: len(said.of("waits")) == 2)
    job.send(signal.SIGTERM)
    (job.there / "go-on").touch()
    assert job.wait() == 128 + signal.SIGTERM
    (saved,) = said.of("saves")
    assert saved["step"] >= 5
    assert f"saved the state after {saved['step']} steps" in job.stderr()
    # A job that starts later goes on from there, and forgets it once it has made a step.
    again = start("--resume-file", str(kept), steps=saved["step"] + 2, there=str(tmp_path))
    assert again.wait() == 0, again.stderr()
    assert {line["step"] for line in lines(tmp_path, "begins")} == {saved["step"]}
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a path",), "not a function"),
        ((lambda: "path",), "does not take it"),
        ((lambda reason, step: "path",), "does not take it"),
        ((returns_nothing,), "Return the path"),
        ((lambda reason: "path", 0.0), "positive number of seconds"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        ddp.on_failure(arguments[0], limit_s=arguments[-1] if len(arguments) > 1 else 25.0)


REFUSED = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import ddp
from ddp.telemetry.coded import WrongUse

def save(reason):
    return "path"

assert ddp.on_failure(save) is save  # without a launcher
assert ddp.resume_path() is None
os.environ["DDP_SCRATCH"] = "/nowhere"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
OPTIMIZER
for attempt in range(2):  # a call that was refused does not count
    try:
        ddp.on_failure(save)
    except WrongUse as error:
        assert "Use ddp.elastic.State" in str(error), error
        print(error)
del model, optimizer
"""
SHARDED = """
from torch.distributed.optim import ZeroRedundancyOptimizer
class Own(ZeroRedundancyOptimizer):
    pass
optimizer = Own(model.parameters(), torch.optim.SGD, lr=0.1)
"""


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        ("optimizer = torch.optim.SGD(fully_shard(model).parameters())", "FSDPModule|DTensor"),
        pytest.param(SHARDED, "with ZeroRedundancyOptimizer each rank", marks=pytest.mark.nightly),
    ],
    ids=["shards", "a class of its own"],
)
def test_shards_are_refused_and_without_a_launcher_there_is_no_effect(optimizer: str, named: str) -> None:
    source = REFUSED.replace("OPTIMIZER", optimizer)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(named, done.stdout)


LEFT_OVER = """
import os, signal, torch, ddp
ddp.on_failure(lambda reason: print("saves") or "path")
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), signal.SIGTERM)
signal.sigtimedwait([], 20.0)
"""


def test_variables_that_are_left_from_a_launcher_have_no_effect(tmp_path: Path) -> None:
    """SIGTERM ends the process at once: nobody waits for what it could save."""
    left = os.environ | {"DDP_SCRATCH": str(tmp_path), "DDP_GUARD": str(tmp_path / "gone")}
    command = [sys.executable, "-c", LEFT_OVER]
    done = subprocess.run(command, env=left, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


@NIGHTLY
def test_the_node_with_the_store_is_lost(start: Callable[..., Launched], tmp_path: Path) -> None:
    """Its rank dies with it. The other node saves, and a new node gets the path as well."""
    address = f"127.0.0.1:{free_port()}"
    serve = [
        str(Path(sys.executable).with_name("ddp-rendezvous")),
        "serve",
        "--listen",
        address,
        "--insecure",
    ]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as service:
        try:
            where = ("--nnodes", "2", "--nproc-per-node", "1", "--rendezvous", address, "--rdzv-id", "nodes")
            # All write to one folder, as nodes with shared storage do.
            plan = {"steps": 30, "stop_at": 20, "there": str(tmp_path)}
            lost, other = (start(*where, "--node-rank", rank, **plan) for rank in ("0", "1"))
            eventually(lambda: len(lines(tmp_path, "waits")) == 2)
            lost.send(signal.SIGKILL)
            (tmp_path / "go-on").touch()
            new = start(*where, "--node-rank", "0", **plan)
            assert (other.wait(), new.wait()) == (0, 0), other.stderr()
        finally:
            service.kill()
    (saved,) = lines(tmp_path, "saves")
    assert saved["rank"] == 1
    resumed = [line for line in lines(tmp_path, "begins") if line["path"]]
    assert [line["step"] for line in resumed] == [saved["step"]] * 2
