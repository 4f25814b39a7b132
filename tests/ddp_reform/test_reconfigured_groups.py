"""`shm` and `hier` have the interface that torch 2.14 gives to groups for fault tolerance.

These are the cases of torch's own tests, which run for any backend: shrink, grow, split, merge, join late, recover.
"""

from __future__ import annotations

import pytest
import world
from world import Failed, World

BACKENDS = ["shm", "hier"]


@pytest.fixture(params=BACKENDS)
def three(request: pytest.FixtureRequest) -> World:
    with World(
        3, world.one_group, request.param, hosts=[0, 0, 1] if request.param == "hier" else []
    ) as ranks:
        yield ranks


def reconfigure(ranks: World, *groups: tuple[int, list[int]]) -> dict[int, tuple[int, int, float]]:
    """Each group: a number and its ranks in the first world, in their new order."""
    handles = ranks.run(world.handle)
    for number, members in groups:
        ranks.tell(world.reconfigured, number, [handles[member] for member in members], ranks=members)
    return {m: a for _, members in groups for m, a in zip(members, ranks.answers(members), strict=True)}


def test_members_are_excluded_and_come_back(three: World) -> None:
    everybody = {0: (0, 3, 6.0), 1: (1, 3, 6.0), 2: (2, 3, 6.0)}
    assert reconfigure(three, (100, [0, 1, 2])) == everybody
    assert reconfigure(three, (101, [0, 1])) == {0: (0, 2, 3.0), 1: (1, 2, 3.0)}
    assert reconfigure(three, (102, [0, 1, 2])) == everybody
    assert reconfigure(three, (103, [0, 2])) == {0: (0, 2, 3.0), 2: (1, 2, 3.0)}
    assert reconfigure(three, (104, [2, 0, 1])) == {2: (0, 3, 6.0), 0: (1, 3, 6.0), 1: (2, 3, 6.0)}


def test_members_split_and_merge(three: World) -> None:
    alone = reconfigure(three, (600, [0]), (601, [1]), (602, [2]))
    assert alone == {rank: (0, 1, 1.0) for rank in range(3)}
    assert reconfigure(three, (603, [0]), (604, [1, 2])) == {0: (0, 1, 1.0), 1: (0, 2, 3.0), 2: (1, 2, 3.0)}
    reconfigure(three, (605, [0, 1, 2]))
    assert three.run(world.sent_around) == [3.0, 1.0, 2.0]


def test_an_aborted_group_recovers(three: World) -> None:
    three.run(world.aborted)
    three.tell(world.total)
    with pytest.raises(Failed, match="aborted the process group"):
        three.answers()
    assert reconfigure(three, (1200, [0, 1, 2])) == {0: (0, 3, 6.0), 1: (1, 3, 6.0), 2: (2, 3, 6.0)}


def test_a_mistake_is_said_and_changes_nothing(three: World) -> None:
    handles = three.run(world.handle)
    reconfigure(three, (7, [0, 1, 2]))
    assert "already used" in three.run(world.refused, 7, handles)[0]
    assert "is not among them" in three.run(world.refused, 8, ["shm:0:1", "hier:0:1"])[0]
    assert "one is there twice" in three.run(world.refused, 9, [*handles, *handles])[0]
    three.tell(world.refused, 10, [handles[0], "gloo"], ranks=[0])
    assert "invalid handle 'gloo'" in three.answers([0])[0]
    assert three.run(world.total) == [6.0] * 3
