"""Which groups a survivor forms anew, and what it says when it cannot know them."""

from __future__ import annotations

import pytest

from ddp.groups.reform_plan import (
    END,
    Announced,
    CannotReform,
    GroupMembers,
    WorldPlace,
    new_groups,
    objection,
)

WORLD = GroupMembers("0", (0, 1, 2))
EVERYBODY = GroupMembers("1", (0, 1, 2))
PAIR = GroupMembers("2", (0, 1))


def test_in_a_world_of_the_same_size_every_group_keeps_its_ranks() -> None:
    groups = [WORLD, EVERYBODY, PAIR]
    assert new_groups(groups, 3, WorldPlace(1, 3), WorldPlace(1, 3)) == groups


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_group_of_all_ranks_has_all_ranks_of_a_world_of_another_size(size: int) -> None:
    found = new_groups([WORLD, EVERYBODY], 2, WorldPlace(0, 3), WorldPlace(0, size))
    assert [group.ranks for group in found] == [tuple(range(size))] * 2
    assert [group.name for group in found] == ["0", "1"]


def test_a_survivor_may_get_another_rank_if_it_is_a_member_of_the_same_groups() -> None:
    groups = [WORLD, EVERYBODY, PAIR]
    assert new_groups(groups, 3, WorldPlace(0, 3), WorldPlace(1, 3)) == groups


HASHED = GroupMembers("9f86d081", (0, 1, 2))
SPLIT = GroupMembers("3", (0, 1, 2), is_split=True)
UNKNOWN = [
    (
        [WORLD, EVERYBODY, PAIR],
        3,
        WorldPlace(0, 3),
        WorldPlace(0, 2),
        r"the group 2 has the ranks \[0, 1\] of 3, and the world now has 2",
    ),
    ([WORLD], 2, WorldPlace(2, 3), WorldPlace(1, 2), "there are groups of which this rank is not a member"),
    (
        [WORLD, HASHED],
        1,
        WorldPlace(0, 3),
        WorldPlace(0, 4),
        "the name of the group 9f86d081 depends on its ranks",
    ),
    ([WORLD, EVERYBODY, PAIR], 3, WorldPlace(0, 3), WorldPlace(2, 3), "rank 0 has become rank 2"),
    ([WORLD], 2, WorldPlace(0, 3), WorldPlace(2, 3), "rank 0 has become rank 2"),
    ([WORLD, SPLIT], 4, WorldPlace(0, 3), WorldPlace(0, 3), "the group 3 was split from the default group"),
]


@pytest.mark.parametrize(("groups", "n_names", "before", "now", "said"), UNKNOWN)
def test_what_only_the_script_knows_is_refused(
    groups: list[GroupMembers], n_names: int, before: WorldPlace, now: WorldPlace, said: str
) -> None:
    with pytest.raises(CannotReform, match=said):
        new_groups(groups, n_names, before, now)


def test_announcements_that_differ_are_explained() -> None:
    mine = Announced("1", (0, 1), "cpu:shm")
    assert objection(mine, 1, mine) == ""
    assert "has not formed the group 1 of the ranks [0, 1]" in objection(mine, 1, Announced(END))
    other = objection(mine, 1, Announced("1", (0, 1, 2), "cpu:gloo"))
    assert "rank 1 forms the group 1 of the ranks [0, 1, 2] (cpu:gloo)" in other
    assert "this process 1 of [0, 1] (cpu:shm)" in other
