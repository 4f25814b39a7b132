"""Ranks that are healed in place: survivors keep their processes, and the result is that of an undisturbed run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from conftest import PROGRAM, Told
from healed import Job, needs_reset_of_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def heal(tmp_path: Path) -> Callable[..., tuple[Job, Told]]:
    def play(sizes: tuple[int, ...] = (2,), **plan: Any) -> tuple[Job, Told]:
        plan = {"model": "ours", "epochs": 2, "state": {}, "run": True} | plan
        there = tmp_path / "healed" / "there"
        there.mkdir(parents=True)
        env = {"PLAN": json.dumps(plan), "THERE": str(there)}
        job = Job(PROGRAM, tmp_path / "healed", list(sizes), env)
        job.play()
        said = "\n".join(path.read_text() for path in sorted(job.folder.glob("rank*")))
        assert set(job.codes) <= {0, -9}, said
        paths = sorted(there.glob("told-*"))
        return job, Told([json.loads(line) for path in paths for line in path.read_text().splitlines()])

    return play


def kill(*ranks: int, step: int, when: str) -> dict[str, Any]:
    return {"ranks": ranks, "step": step, "when": when}


DEATHS = {
    "1": kill(1, step=4, when="before"),
    "2": kill(0, step=7, when="in"),
    "3": kill(1, step=12, when="after"),
}


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("ours", "shm"),
        ("torch", "gloo"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                ("ours", "hier"),
                ("ours", "gloo"),
                ("torch", "shm"),
            )
        ),
        *(
            pytest.param("fsdp2", each, marks=(pytest.mark.nightly, needs_reset_of_fsdp))
            for each in ("shm", "gloo")
        ),
    ],
)
def test_survivors_keep_their_processes_and_the_result_is_that_of_an_undisturbed_run(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told], model: str, backend: str
) -> None:
    calm = train(model=model, backend=backend, run=True)
    job, told = heal(model=model, backend=backend, kill=DEATHS)
    assert told.losses() == calm.losses()
    assert told.digests() == calm.digests()
    for number, dead in enumerate((1, 0, 1)):
        before, after = job.pids[number], job.pids[number + 1]
        assert (before[dead] == after[dead], before[1 - dead] == after[1 - dead]) == (False, True)


def test_a_function_runs_once_for_each_step_whoever_dies(heal: Callable[..., tuple[Job, Told]]) -> None:
    job, told = heal(rows=True, kill=DEATHS)
    rows = [line.split() for line in (job.folder / "there" / "rows").read_text().splitlines()]
    assert [int(number) for number, _loss in rows] == [*range(1, len(told.losses()) + 1)]
    assert [float(loss) for _number, loss in rows] == told.losses()


MID_STEP = {
    "1": kill(1, step=3, when="forward1"),
    "2": kill(0, step=5, when="backward"),
    "3": kill(0, step=8, when="stepping"),
}


@pytest.mark.parametrize(
    ("model", "every"),
    [
        pytest.param("fsdp2", 3, marks=needs_reset_of_fsdp),
        pytest.param("fsdp2", 1, marks=(pytest.mark.nightly, needs_reset_of_fsdp)),
    ],
)
def test_shards_go_back_to_the_last_commit_from_anywhere_in_a_step(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told], model: str, every: int
) -> None:
    """Gradients of the interrupted step are dropped, also those that were accumulated before they are averaged."""
    plan = {"model": model, "accumulate": True, "epochs": 1}
    calm = train(**plan, run=True)
    job, told = heal(**plan, kill=MID_STEP, state={"every": every})
    assert told.losses() == calm.losses()
    assert told.digests() == calm.digests()
    assert len({pids[1] for pids in job.pids[1:]}) == 1
    first = [min(told.digests_in(generation)) for generation in (2, 3, 4)]
    assert first == [each - (each - 1) % every for each in (3, 5, 8)]


@pytest.mark.nightly(instead="::test_shards_go_back_to_the_last_commit_from_anywhere_in_a_step")
@needs_reset_of_fsdp
def test_replicas_of_a_shard_have_it(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told]
) -> None:
    """HSDP: the memory of a lost node held a shard that the memory of another node holds too."""
    plan = {"model": "hsdp", "own_nodes": True, "epochs": 1, "draws": False}
    calm = train(4, **plan, run=True)
    deaths = {"1": kill(0, step=3, when="backward")}
    job, told = heal((4,), **plan, kill=deaths, replaced={"2": [0]})
    assert told.digests() == calm.digests()
    assert job.pids[0][1:] == job.pids[1][1:]


@needs_reset_of_fsdp
@pytest.mark.nightly(
    instead=(
        "::test_survivors_keep_their_processes_and_the_result_is_that_of_an_undisturbed_run",
        "::test_between_two_commits_no_step_is_lost_or_done_twice",
        "::test_shards_go_back_to_the_last_commit_from_anywhere_in_a_step",
    )
)
def test_tensor_parallel_and_fsdp2_together(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told]
) -> None:
    plan = {"model": "2d", "backend": "gloo", "epochs": 1, "draws": False}
    calm = train(4, **plan, run=True)
    deaths = {"1": kill(1, step=2, when="forward0"), "2": kill(0, 2, step=4, when="backward")}
    job, told = heal((4,), **plan, kill=deaths)
    assert told.digests() == calm.digests()
    assert job.pids[0][3] == job.pids[1][3] == job.pids[2][3]


@pytest.mark.nightly(
    instead=(
        "::test_shards_go_back_to_the_last_commit_from_anywhere_in_a_step",
        "elastic/test_lost_nodes.py::test_one_of_four_nodes_is_lost",
    )
)
@needs_reset_of_fsdp
def test_shards_of_a_lost_node_are_computed_from_what_others_keep(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told]
) -> None:
    plan = {"model": "fsdp2", "own_nodes": True, "epochs": 1}
    calm = train(3, **plan, run=True)
    job, told = heal(
        (3,),
        **plan,
        kill={"1": kill(1, step=2, when="after"), "2": kill(0, step=4, when="after")},
        replaced={"2": [1], "3": [0]},
        protected=[2, 4],
        state={"redundancy": "code:2+1"},
    )
    assert told.losses() == calm.losses()
    assert told.digests() == calm.digests()
    assert job.pids[0][2] == job.pids[1][2] == job.pids[2][2]


@pytest.mark.parametrize(
    ("when", "reduces"),
    [
        ("forward2", "before"),
        ("before", "after"),
        *(
            pytest.param(when, reduces, marks=pytest.mark.nightly)
            for when in ("forward0", "forward2", "stepping", "before", "after")
            for reduces in ("before", "after")
            if (when, reduces) not in (("forward2", "before"), ("before", "after"))
        ),
    ],
)
def test_between_two_commits_no_step_is_lost_or_done_twice(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told], when: str, reduces: str
) -> None:
    plan = {"accumulate": True, "reduces": reduces, "epochs": 1, "model": "plain"}
    calm = train(**plan, run=True)
    _job, told = heal(**plan, kill={"1": kill(1, step=6, when=when)}, state={"every": 4})
    assert told.losses() == calm.losses()
    assert told.digests() == calm.digests()


@pytest.mark.nightly(
    instead=(
        "::test_survivors_keep_their_processes_and_the_result_is_that_of_an_undisturbed_run",
        "shell/test_heals.py::test_the_others_keep_their_processes_when_two_are_killed_at_once",
    )
)
def test_two_die_at_once_and_then_another_one_while_the_job_heals(
    heal: Callable[..., tuple[Job, Told]], train: Callable[..., Told]
) -> None:
    calm = train(4, epochs=1, run=True)
    deaths = {
        "1": kill(0, 2, step=3, when="before"),
        "2": kill(3, step=0, when="begins"),
        "3": kill(1, step=4, when="in"),
    }
    job, told = heal((4,), epochs=1, kill=deaths)
    assert told.losses() == calm.losses()
    assert told.digests() == calm.digests()
    assert job.pids[0][1] == job.pids[1][1] == job.pids[2][1]


def test_the_world_grows_and_shrinks_around_the_survivors(heal: Callable[..., tuple[Job, Told]]) -> None:
    deaths = {"1": kill(1, step=3, when="before"), "2": kill(2, step=5, when="before")}
    job, told = heal((2, 3, 2), model="ours", epochs=1, kill=deaths)
    assert [len(pids) for pids in job.pids] == [2, 3, 2]
    assert job.pids[0][0] == job.pids[1][0] == job.pids[2][0]
    assert set(told.samples()) == set(range(58))
    assert told.losses()


def test_a_rank_that_gloo_holds_forever_gets_a_new_process(tmp_path: Path) -> None:
    """A message is on its way to a rank that dies: nothing but the timeout of the group ends the wait for it."""
    there = tmp_path / "there"
    there.mkdir()
    job = Job(PROGRAM.with_name("forgotten.py"), tmp_path, [3], {"THERE": str(there)})
    job.play()
    before, after = job.pids
    assert [was == now for was, now in zip(before, after, strict=True)] == [False, False, True]
    assert sorted(job.codes) == [-9, 0, 0, 0, 1]
    said = (tmp_path / "rank0").read_text()
    assert "rank 0 cannot leave send in torch.distributed.distributed_c10d" in said


EDITED = """
import os, signal, torch, torch.distributed as dist, ddp
from ddp import elastic

ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1))
if (is_early := os.environ["IS_EARLY"]) == "0":
    state = elastic.State(model=model, step=0)
if os.environ["DDP_GENERATION"] == "1":
    dist.barrier()  # both have loaded the script
    if os.environ["RANK"] == "1":
        with open(__file__, "a") as file:
            file.write("edited = True")
    dist.barrier()
if is_early == "1":
    state = elastic.State(model=model, step=0)

def train():
    while state.step < 4:
        model(torch.ones(1, 2)).sum().backward()
        state.step += 1
        state.commit()
        if (state.step, os.environ["RANK"], os.environ["DDP_GENERATION"]) == (2, "1", "1"):
            os.kill(os.getpid(), signal.SIGKILL)

state.run(train)
state.close()
ddp.shutdown()
"""


@pytest.mark.parametrize("is_early", ["0", "1"], ids=["with a State", "before the State is made"])
def test_a_file_that_is_edited_before_the_training_begins_is_named_after_a_heal(
    tmp_path: Path, is_early: str
) -> None:
    (tmp_path / "train.py").write_text(EDITED)
    job = Job(tmp_path / "train.py", tmp_path, [2], {"IS_EARLY": is_early})
    job.play()
    assert sorted(job.codes) == [-9, 0, 0]
    assert "the ranks run different versions of train.py" in (tmp_path / "rank0").read_text()
