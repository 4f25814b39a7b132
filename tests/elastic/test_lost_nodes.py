"""Nodes are lost with the shards in their memory, and the job goes on from what other nodes keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Told

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_one_of_four_nodes_is_lost",
        "wings/redundancy/test_recovery.py",
        "wings/redundancy/test_protecting.py",
    )
)


def undisturbed(train: Callable[..., Told], nproc: int, model: str = "fsdp2") -> Told:
    return train(nproc, model=model, own_nodes=True, epochs=1)


def lose(
    train: Callable[..., Told],
    nproc: int,
    lost: dict[int, tuple[int, list[int]]],
    redundancy: str,
    model: str = "fsdp2",
) -> Told:
    """In these generations, after the commit of a step, these ranks are lost with their nodes."""
    kill = {
        str(generation): {"step": step, "when": "after", "ranks": ranks}
        for generation, (step, ranks) in lost.items()
    }
    return train(
        nproc,
        restarts=len(lost),
        model=model,
        own_nodes=True,
        epochs=1,
        state={"redundancy": redundancy},
        protected=[step for step, _ranks in lost.values()],
        kill=kill,
        replaced={str(generation + 1): ranks for generation, (_step, ranks) in lost.items()},
    )


def expect_the_same(told: Told, expected: Told, numbers: list[int]) -> None:
    """The job resumed from these commits, and ended as if nothing had happened, to the last bit."""
    for generation, number in enumerate(numbers, 2):
        resumed = told.of("resumed", generation)
        assert resumed
        assert {(each["number"], each["in_memory"]) for each in resumed} == {(number, True)}
    assert told.digests() == expected.digests()
    assert told.losses() == expected.losses()
    drawn = {line["rank"]: line["drawn"] for line in told.of("step", generation=len(numbers) + 1)}
    assert drawn == {line["rank"]: line["drawn"] for line in expected.of("step")}


def test_one_of_four_nodes_is_lost(train: Callable[..., Told]) -> None:
    told = lose(train, 4, {1: (3, [2])}, "code:3+1")
    expect_the_same(told, undisturbed(train, 4), [3])


@NIGHTLY
@pytest.mark.parametrize(
    ("redundancy", "lost"),
    [("code:3+1", [1]), ("code:2+2", [0, 2])],  # the second: both copies of a shard
)
def test_shards_of_which_several_nodes_have_copies(
    train: Callable[..., Told], redundancy: str, lost: list[int]
) -> None:
    told = lose(train, 4, {1: (3, lost)}, redundancy, "hsdp")
    expect_the_same(told, undisturbed(train, 4, "hsdp"), [3])


@NIGHTLY
def test_two_of_eight_nodes_are_lost(train: Callable[..., Told]) -> None:
    told = lose(train, 8, {1: (1, [0, 5])}, "code:6+2")
    expect_the_same(told, undisturbed(train, 8), [1])


@NIGHTLY
def test_another_node_is_lost_after_the_resume(train: Callable[..., Told]) -> None:
    told = lose(train, 3, {1: (2, [0]), 2: (4, [1]), 3: (5, [2])}, "copies:1")
    expect_the_same(told, undisturbed(train, 3), [2, 4, 5])


@NIGHTLY
def test_more_nodes_than_the_code_survives(train: Callable[..., Told]) -> None:
    told = lose(train, 4, {1: (3, [1, 2])}, "code:3+1")
    assert not told.of("resumed")  # without a folder, the job begins again
    assert told.losses() == undisturbed(train, 4).losses()


def test_a_redundancy_that_has_no_meaning_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="invalid redundancy 'twice': use none, auto, copies:N"):
        elastic.State(step=0, redundancy="twice")
    monkeypatch.setenv("DDP_REDUNDANCY", "code:6")
    with pytest.raises(ValueError, match="invalid redundancy 'code:6'"):
        elastic.State(step=0)
    elastic.State(step=0, redundancy="none")  # the script has the last word
