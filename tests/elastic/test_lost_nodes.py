"""Nodes are lost with the shards in their memory, and the job goes on from what other nodes keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Told


def undisturbed(train: Callable[..., Told], nproc: int) -> Told:
    return train(nproc, model="fsdp2", own_nodes=True, epochs=1)


def lose(train: Callable[..., Told], nproc: int, ranks: list[int], redundancy: str, **plan: Any) -> Told:
    """These ranks are lost after commit 3, with their nodes."""
    return train(
        nproc,
        restarts=1,
        **{
            "model": "fsdp2",
            "own_nodes": True,
            "epochs": 1,
            "state": {"redundancy": redundancy},
            "protected": 3,
        },
        **{"kill": {"1": {"step": 3, "when": "after", "ranks": ranks}}, "replaced": {"2": ranks}},
        **plan,
    )


def expect_the_same(told: Told, expected: Told, nproc: int) -> None:
    resumed = told.of("resumed", generation=2)
    assert [(each["number"], each["in_memory"]) for each in resumed] == [(3, True)] * nproc
    assert told.digests() == expected.digests()
    assert told.losses() == expected.losses()
    last = {line["rank"]: line["drawn"] for line in told.of("step", generation=2)}
    assert last == {line["rank"]: line["drawn"] for line in expected.of("step")}  # generators too


def test_one_of_four_nodes_is_lost(train: Callable[..., Told]) -> None:
    told = lose(train, 4, [2], "code:3+1")
    expect_the_same(told, undisturbed(train, 4), 4)
