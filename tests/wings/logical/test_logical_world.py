"""Logical ranks: worlds of every size give the same bits, and what cannot give them is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generations
import pytest
import torch
from torch import nn

import ddp
from ddp import comm_hooks, elastic
from ddp.elastic import generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "programs" / "logical.py"
CASES = [
    "plain",
    "views and small buckets",
    "parameters that some do not use",
    "accumulated",
    "float64 in channels last",
    "several passes",
]
Told = dict[str, list[Any]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Told]:
    numbers = itertools.count()

    def run(processes: int, hosts: int = 1, **plan: Any) -> Told:
        folder = tmp_path_factory.mktemp(f"job{next(numbers)}")
        env = {"PLAN": json.dumps({"cases": CASES} | plan), "THERE": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"HOSTS": str(hosts)}
        codes = generations.play(PROGRAM, folder, processes, 0, env)
        assert not any(codes), "\n".join(path.read_text() for path in sorted(folder.glob("rank*")))
        told: Told = json.loads((folder / "told").read_text())
        return told

    return run


@pytest.fixture(scope="module")
def alone(train: Callable[..., Told]) -> Told:
    """One process with all logical ranks."""
    told = train(1)
    assert sorted(told) == sorted(CASES)
    for case in told.values():
        assert len({digest for _step, digest, _mean in case}) == 6, "every step changes the bits"
    return told


@pytest.mark.parametrize(
    ("processes", "backend", "hosts"),
    [
        (4, "shm", 1),
        pytest.param(3, "shm", 1, marks=pytest.mark.nightly),
        pytest.param(4, "gloo", 1, marks=pytest.mark.nightly),
        pytest.param(2, "shm", 1, marks=pytest.mark.nightly),
        pytest.param(3, "hier", 3, marks=pytest.mark.nightly),
        pytest.param(4, "hier", 2, marks=pytest.mark.nightly),
        pytest.param(1, "gloo", 1, marks=pytest.mark.nightly),
        pytest.param(2, "gloo", 1, marks=pytest.mark.nightly),
    ],
)
def test_worlds_of_every_size_give_the_same_bits(
    train: Callable[..., Told], alone: Told, processes: int, backend: str, hosts: int
) -> None:
    told = train(processes, hosts, backend=backend)
    for case in CASES:
        assert told[case] == alone[case], case


def test_processes_that_divide_nothing_send_several_sums(train: Callable[..., Told]) -> None:
    """Of five logical ranks the second of three processes has two that are not in one sum."""
    assert train(1, logical=5, steps=2) == train(3, backend="gloo", logical=5, steps=2)


@pytest.mark.nightly(
    instead=(
        "::test_worlds_of_every_size_give_the_same_bits",
        "::test_processes_that_divide_nothing_send_several_sums",
        "wings/logical/test_logical_ranks.py::test_any_number_of_processes_forms_the_same_sum",
    )
)
@pytest.mark.parametrize("logical", [1, 2, 5, 6, 8])
def test_any_number_of_logical_ranks(train: Callable[..., Told], logical: int) -> None:
    runs = [
        train(processes, backend=backend, logical=logical, steps=2)
        for backend in ("shm", "gloo")
        for processes in range(1, min(logical, 6) + 1)
    ]
    assert all(run == runs[0] for run in runs)


def test_every_change_of_the_world_goes_on_with_the_same_bits(
    train: Callable[..., Told], alone: Told, tmp_path: Path
) -> None:
    told: list[Any] = []
    for processes, stop in ((4, 2), (1, 4), (2, 6)):
        told += train(processes, cases=["plain"], folder=str(tmp_path), stop=stop)["plain"]
    assert told == alone["plain"]


# --- a world of one process, here -----------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    threads = torch.get_num_threads()
    ddp.init("gloo")
    yield
    ddp.shutdown()
    torch.set_num_threads(threads)


def wrapped(*layers: nn.Module, **options: Any) -> ddp.DistributedDataParallel:
    return ddp.DistributedDataParallel(nn.Sequential(*(layers or [nn.Linear(3, 3)])), **options)


def one_step(world: elastic.LogicalWorld, model: nn.Module) -> None:
    for rank in world.ranks(model):
        model(torch.full((2, 3), rank + 1.0)).sum().backward()


def test_gradients_are_averages_over_logical_ranks_and_add_up_between_steps(here: None) -> None:
    world, model = elastic.LogicalWorld(3), wrapped(nn.Linear(3, 1))
    layer = model.module[0]
    for step in (1, 2):  # nobody has reset the gradients
        one_step(world, model)
        assert torch.equal(layer.weight.grad, torch.full((1, 3), 4.0 * step))
        assert layer.bias.grad.item() == 2 * step
    model(torch.ones(2, 3)).sum()  # a forward between steps changes nothing
    assert model.require_backward_grad_sync


def test_each_logical_rank_has_generators_of_its_own_and_the_script_keeps_its_own(here: None) -> None:
    world, model = elastic.LogicalWorld(4), wrapped()
    world.state_dict()  # as the first commit
    outside = generators.get()["cpu"]
    drawn = []
    for _step in range(3):
        for _rank in world.ranks(model):
            drawn.append(tuple(torch.rand(4).tolist()))
            model(torch.ones(2, 3)).sum().backward()
        assert torch.equal(generators.get()["cpu"], outside)
    assert len(set(drawn)) == 12


def test_a_step_that_raised_is_done_again_with_the_same_numbers(here: None) -> None:
    world, model = elastic.LogicalWorld(2), wrapped(nn.BatchNorm1d(3), nn.Linear(3, 3))
    statistics = model.module[0].running_mean.clone()
    drawn: list[list[float]] = []
    raised: list[Exception] = []
    for attempt in range(2):
        try:
            for rank in world.ranks(model):
                drawn.append(torch.rand(2).tolist())
                if rank == 0:
                    assert torch.equal(model.module[0].running_mean, statistics)
                model(torch.full((2, 3), rank + 1.0)).sum().backward()
                if attempt == 0:
                    raise ZeroDivisionError
        except ZeroDivisionError as error:
            raised.append(error)  # with its traceback, and so with the iterator of the loop
        assert model.require_backward_grad_sync
        model.module[0].running_mean.copy_(statistics) if attempt == 0 else None
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("layers", "options", "reason"),
    [
        ([nn.Linear(3, 3).to(torch.bfloat16)], {}, "0.weight is not float32 or float64"),
        ([nn.Embedding(3, 3, sparse=True)], {}, "the gradient of 0.weight is sparse"),
        (
            [nn.Linear(3, 3)],
            {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
            "skip_all",
        ),
    ],
)
def test_models_that_cannot_give_the_same_bits_are_refused(
    here: None, layers: list[nn.Module], options: dict[str, Any], reason: str
) -> None:
    model = wrapped(*layers, **options)
    with pytest.raises(ValueError, match=reason):
        one_step(elastic.LogicalWorld(2), model)
    assert model.require_backward_grad_sync


def test_what_else_is_refused(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized = wrapped()
    synchronized.module.append(nn.SyncBatchNorm(3))  # now: torch wraps it on GPUs only
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        one_step(elastic.LogicalWorld(2), synchronized)
    hooked = wrapped()
    hooked.register_comm_hook(None, comm_hooks.bf16)
    with pytest.raises(ValueError, match="communication hook"):
        one_step(elastic.LogicalWorld(2), hooked)
    with pytest.raises(TypeError, match="DistributedDataParallel, but got a Linear"):
        one_step(elastic.LogicalWorld(2), nn.Linear(3, 3))
    for text, error in (("many", "DDP_LOGICAL_WORLD='many'"), ("0", "invalid logical world 0")):
        monkeypatch.setenv("DDP_LOGICAL_WORLD", text)
        with pytest.raises(ValueError, match=error):
            elastic.LogicalWorld()
    monkeypatch.setenv("DDP_LOGICAL_WORLD", "5")
    world, model = elastic.LogicalWorld(), wrapped()
    assert (world.size, list(world.mine)) == (5, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="one value for each of the 5 logical ranks"):
        world.mean([torch.ones(())])
    with pytest.raises(RuntimeError, match="logical rank 4 ended without an averaged backward"):
        for _rank in world.ranks(model):
            pass
    one_step(world, model)
    with pytest.raises(RuntimeError, match="outside of a step of the logical world"):
        model(torch.ones(2, 3)).sum().backward()


def test_mistakes_with_the_loader(here: None) -> None:
    world, model = elastic.LogicalWorld(2), wrapped()
    with pytest.raises(ValueError, match="num_replicas and rank have no effect"):
        elastic.ElasticSampler(8, num_replicas=2, logical_world=world)
    sampler = elastic.ElasticSampler(8, shuffle=False, logical_world=world)
    with pytest.raises(TypeError, match=r"batch_sampler=sampler\.batches"):
        iter(sampler)
    with pytest.raises(ValueError, match="batch_size=0"):
        sampler.batches(0)
    assert list(sampler.batches(3)) == [[0, 2, 4], [1, 3, 5], [6], [7]]
    assert list(sampler.batches(3, drop_last=True)) == [[0, 2, 4], [1, 3, 5]]
    assert len(sampler.batches(3)) == 4
    (step,) = itertools.islice(world.steps([torch.ones(2, 3)], model), 1)
    model(next(step)).sum().backward()
    with pytest.raises(RuntimeError, match="no batch for logical rank 1"):
        next(step)
    with pytest.raises(RuntimeError, match="was left before its end"):
        list(world.steps([torch.ones(2, 3)] * 4, model))


def test_a_commit_of_another_logical_world_is_refused(here: None) -> None:
    saved = elastic.LogicalWorld(2).state_dict()
    with pytest.raises(ValueError, match=r"logical_world=2, but here it is 3.*Use logical_world=2"):
        elastic.LogicalWorld(3).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"threads=1, but here it is 2"):
        elastic.LogicalWorld(2, threads=2).load_state_dict(saved)
