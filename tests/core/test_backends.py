"""Who lives with whom, and which backend suits a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.groups.backends import choose, layout


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
