"""A training that is disturbed ends as one that was not: the same losses to the last bit, each sample once."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Told

SIZE = 58  # samples of programs/training.py: 10 steps an epoch for two ranks


def kill(rank: int, step: int, when: str) -> dict[str, Any]:
    return {"ranks": [rank], "step": step, "when": when}


@pytest.mark.parametrize(
    "model", ["ours", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("torch", "fsdp2"))]
)
def test_ranks_die_and_the_loss_curve_is_that_of_an_undisturbed_run(
    train: Callable[..., Told], model: str
) -> None:
    calm = train(model=model)
    assert len(calm.losses()) == 20
    deaths = {"1": kill(1, 4, "before"), "2": kill(0, 7, "in"), "3": kill(1, 12, "after")}
    told = train(model=model, restarts=3, kill=deaths)
    assert told.losses() == calm.losses()
    assert told.digests() == calm.digests()
    for generation, at_least in ((2, 3), (3, 6), (4, 11)):
        first, second = told.of("resumed", generation)
        assert first["number"] == second["number"]
        assert at_least <= first["number"] <= at_least + 1, "what was committed was not lost"
        assert first["in_memory"]


@pytest.mark.parametrize("model", [pytest.param("torch", marks=pytest.mark.nightly), "fsdp2"])
def test_worlds_of_other_sizes_go_on_with_the_same_state_and_the_rest_of_the_epoch(
    train: Callable[..., Told], tmp_path: Path, model: str
) -> None:
    state = {"folder": str(tmp_path / "commits"), "disk_every": 1}
    first = train(3, model=model, stop=3, epochs=1, state=state)
    second = train(2, model=model, stop=5, epochs=1, state=state)
    third = train(3, model=model, epochs=1, state=state)
    for before, after, step in ((first, second, 3), (second, third, 5)):
        for line in after.of("resumed"):
            assert (line["number"], line["in_memory"]) == (step, False)
            assert line["digest"] == before.digests()[step]
    times = Counter(first.samples() + second.samples() + third.samples())
    assert set(times) == set(range(SIZE))
    assert sum(times.values()) - SIZE < 3, "more than the epoch's last round was filled up"


def test_a_replaced_node_is_given_the_state(train: Callable[..., Told]) -> None:
    """Each rank is a node of its own; in each later generation one of them comes with nothing."""
    deaths = {"1": kill(1, 6, "after"), "2": kill(0, 9, "after")}
    told = train(restarts=2, own_nodes=True, replaced={"2": [1], "3": [0]}, kill=deaths)
    for generation, at_least in ((2, 5), (3, 8)):
        resumed = told.of("resumed", generation)
        number = resumed[0]["number"]
        assert [line["number"] for line in resumed] == [number, number]
        assert at_least <= number <= at_least + 1
        assert all(line["in_memory"] for line in resumed)
        assert {line["digest"] for line in resumed} == {told.digests_in(generation - 1)[number]}


def test_when_shards_are_lost_with_their_node_the_disk_is_gone_back_to(
    train: Callable[..., Told], tmp_path: Path
) -> None:
    state = {"folder": str(tmp_path / "commits"), "disk_every": 3}
    told = train(
        restarts=1,
        model="fsdp2",
        own_nodes=True,
        replaced={"2": [1]},
        kill={"1": kill(1, 8, "after")},
        flush=6,
        state=state,
    )
    resumed = told.of("resumed")
    assert [(line["number"], line["in_memory"]) for line in resumed] == [(6, False)] * 2
    assert {line["digest"] for line in resumed} == {told.digests()[6]}


def test_what_came_after_the_last_commit_is_done_again(train: Callable[..., Told]) -> None:
    """And comes out the same."""
    told = train(restarts=1, kill={"1": kill(0, 8, "after")}, state={"every": 3})
    assert {line["number"] for line in told.of("resumed")} == {6}
    for step in (7, 8):
        assert told.digests_in(1)[step] == told.digests_in(2)[step]


def test_generators_in_worlds_of_other_sizes(train: Callable[..., Told], tmp_path: Path) -> None:
    """A rank number that was there goes on in its sequences; a new one gets a seed that equal runs get too."""
    state = {"folder": str(tmp_path / "commits"), "disk_every": 1}
    first = train(1, stop=2, epochs=1, state=state)
    before = next(line["drawn"] for line in first.of("step") if line["step"] == 2)
    runs = []
    for copy in ("one", "other"):
        folder = tmp_path / copy
        shutil.copytree(tmp_path / "commits", folder)
        runs.append(train(3, stop=3, epochs=1, state=state | {"folder": str(folder)}).of("resumed"))
    grown = [line["drawn"] for line in runs[0]]
    assert grown == [line["drawn"] for line in runs[1]]
    assert grown[0] == before
    assert all(len({numbers[kind] for numbers in grown}) == 3 for kind in range(3)), (
        "no two ranks draw the same"
    )
