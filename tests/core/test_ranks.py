from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rendezvous.rounds.sealing import assignment, form_world, natural_key, node_ranks, role_sizes
from rendezvous.values.types import AgentId, NodeFacts


def node(name: str, nproc: int = 1, **facts: object) -> tuple[AgentId, NodeFacts]:
    return AgentId(name, "1"), NodeFacts(name, f"{name}.lan", nproc, **facts)  # type: ignore[arg-type]


def order(*nodes: tuple[AgentId, NodeFacts], held: dict[str, int] | None = None) -> list[str]:
    ranks = node_ranks(nodes, held or {})
    return sorted(ranks, key=ranks.__getitem__)


def test_host_names_are_read_as_people_read_them() -> None:
    assert order(node("node10"), node("node2"), node("node1")) == ["node1", "node2", "node10"]
    assert natural_key("gpu-9-b") < natural_key("gpu-10-a")


def test_the_schedulers_index_comes_before_the_name() -> None:
    assert order(node("a", scheduler_index=1), node("b", scheduler_index=0)) == ["b", "a"]


def test_who_asks_for_a_node_rank_gets_that_very_one() -> None:
    assert order(node("a"), node("b"), node("c", node_rank=1)) == ["a", "c", "b"]
    assert order(node("a", node_rank=1), node("b", node_rank=0)) == ["b", "a"]


def test_a_rank_beyond_the_world_still_comes_before_those_who_asked_for_none() -> None:
    assert order(node("a"), node("b", node_rank=7)) == ["b", "a"]


def test_who_stays_keeps_its_rank_and_the_newcomer_takes_the_hole() -> None:
    assert order(node("a"), node("z"), node("new"), held={"a": 2, "z": 0}) == ["z", "new", "a"]


def test_a_newcomer_cannot_claim_the_rank_of_one_who_stays() -> None:
    assert order(node("a"), node("new", node_rank=0), held={"a": 0}) == ["a", "new"]


def test_when_the_world_shrinks_only_those_without_a_rank_move() -> None:
    assert order(node("b"), node("c"), held={"b": 1, "c": 2}) == ["c", "b"]


def test_offsets_count_ranks_and_role_ranks_in_order_of_node_rank() -> None:
    world = form_world(
        3, [node("a", 4, role="train"), node("b", 2, role="eval"), node("c", 3, role="train")], {}
    )
    sizes = role_sizes(world)
    told = [assignment(world, p, sizes, 2, 5) for p in world.placements]
    assert [(a.rank_offset, a.role_rank_offset, a.role_world_size) for a in told] == [
        (0, 0, 7),
        (4, 0, 2),
        (6, 4, 7),
    ]
    assert {(a.world_size, a.n_nodes, a.generation, a.restart_count, a.max_restarts) for a in told} == {
        (9, 3, 3, 2, 5)
    }
    assert {a.store_host for a in told} == {"a.lan"}


_NAMES = st.lists(st.from_regex(r"[a-c]{1,2}[0-9]{0,2}", fullmatch=True), unique=True, min_size=1, max_size=8)


@given(names=_NAMES, data=st.data())
def test_ranks_have_no_gap_and_no_double_and_are_kept(names: list[str], data: st.DataObject) -> None:
    before = data.draw(st.permutations(names))
    held = {name: rank for rank, name in enumerate(before) if data.draw(st.booleans())}
    wishes = data.draw(st.permutations(range(10)))
    claims = [wish if data.draw(st.booleans()) else None for wish in wishes[: len(names)]]
    nprocs = data.draw(st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names)))
    nodes = [node(n, p, node_rank=c) for n, p, c in zip(names, nprocs, claims, strict=True)]
    world = form_world(1, nodes, held)
    assert [p.node_rank for p in world.placements] == list(range(len(names)))
    ranks = [r for p in world.placements for r in range(p.rank_offset, p.rank_offset + p.facts.nproc)]
    assert ranks == list(range(sum(nprocs)))
    for p in world.placements:
        assert held.get(p.agent.node, p.node_rank) == p.node_rank
    assert form_world(1, list(reversed(nodes)), held) == world
