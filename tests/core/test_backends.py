"""Who lives with whom, and which backend suits a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.groups.rank_info import (
    ALONE,
    END,
    Announced,
    CannotReform,
    GroupMembers,
    InitError,
    RankInfo,
    WorldPlace,
    choose,
    device_index,
    known_backend,
    layout,
    new_groups,
    objection,
    parse_rank_info,
    seconds,
)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.data())
def test_layout_is_the_same_seen_from_every_rank(keys, data):
    seen = [layout(keys, rank) for rank in range(len(keys))]
    assert len({each.hosts for each in seen}) == 1
    assert sorted(rank for host in seen[0].hosts for rank in host) == list(range(len(keys)))
    for rank, each in enumerate(seen):
        assert each.here[each.member] == rank
        assert {keys[neighbour] for neighbour in each.here} == {keys[rank]}
        assert 1 <= each.leaders <= len(each.here)
    rank = data.draw(st.integers(0, len(keys) - 1))
    if seen[rank].is_leader:
        following = seen[rank].leader_at(seen[rank].host + 1)
        assert seen[following].leader_at(seen[following].host - 1) == rank
        assert seen[following].is_leader


def test_hosts_are_in_the_order_of_their_lowest_ranks():
    placed = layout(["b", "a", "a", "b"], 2)
    assert placed.hosts == ((0, 3), (1, 2))
    assert (placed.host, placed.member, placed.leaders, placed.is_leader) == (1, 1, 2, True)
    assert not layout(["a", "a"], 0).is_leader
    assert not layout(["a", "b", "b"], 2).is_leader


@pytest.mark.parametrize(
    ("world", "local", "native", "backend"),
    [(4, 4, True, "shm"), (1, 1, True, "shm"), (4, 2, True, "hier"), (4, 4, False, "gloo")],
)
def test_choice(world, local, native, backend):
    assert choose(world, local, native) == backend


# --- the environment of a rank, read: what a launcher says, and what cannot be meant ------------------


FULL = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_as_a_launcher_says() -> None:
    seat = parse_rank_info(FULL)
    assert seat == RankInfo(5, 8, 1, 4, 1, launched=True)


def test_alone_without_a_launcher() -> None:
    assert parse_rank_info({"MASTER_ADDR": "left over", "PATH": "/bin"}) == ALONE


def test_what_torch_can_do_without_is_worked_out() -> None:
    """Some launchers say only what torch insists on."""
    seat = parse_rank_info(
        {name: FULL[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    )
    assert seat == RankInfo(5, 8, 5, 8, 0, launched=True)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("empty", [False, True])
def test_half_a_launcher_is_a_mistake(missing: str, empty: bool) -> None:
    environ = {name: value for name, value in FULL.items() if name != missing}
    with pytest.raises(InitError, match=f": {missing}\\. .*ddp-launch"):
        parse_rank_info(environ | ({missing: ""} if empty else {}))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("RANK", "8", "from 0 to 7 (WORLD_SIZE=8)"),
        ("RANK", "-1", "from 0 to 7"),
        ("RANK", "one", "from 0 to 7"),
        ("RANK", "²", "from 0 to 7"),
        ("WORLD_SIZE", "0", "1 or more"),
        ("MASTER_PORT", "0", "from 1 to 65535"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 8"),
    ],
)
def test_what_cannot_be_meant(name: str, text: str, words: str) -> None:
    with pytest.raises(InitError) as raised:
        parse_rank_info(FULL | {name: text})
    assert words in str(raised.value)
    assert name in str(raised.value)


def test_devices() -> None:
    assert device_index(RankInfo(5, 8, 1, 4, 1, True), 4, "cuda") == 1
    assert device_index(RankInfo(5, 8, 3, 4, 1, True), 1, "cuda") == 0, "its own, the only one that it sees"
    with pytest.raises(InitError, match=r"cuda.*LOCAL_RANK=3.*--nproc-per-node"):
        device_index(RankInfo(5, 8, 3, 4, 1, True), 2, "cuda")


def test_backends() -> None:
    known = ["gloo", "nccl"]
    assert known_backend("cpu:gloo,cuda:NCCL", known) == "cpu:gloo,cuda:nccl"
    with pytest.raises(InitError, match=r"'glo'.*gloo, nccl"):
        known_backend("glo", known)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_timeout_is_a_time(text: str) -> None:
    assert seconds("2.5", "DDP_TIMEOUT_S") == 2.5
    with pytest.raises(InitError, match="DDP_TIMEOUT_S"):
        seconds(text, "DDP_TIMEOUT_S")


# --- which groups a survivor forms anew, and what it says when it cannot know them --------------------


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
