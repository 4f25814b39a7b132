"""Nodes of the same place in the network get neighbouring ranks."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from test_ranks import node, order

from rendezvous.codec import encode
from rendezvous.control.ctl_text import job_text
from rendezvous.rounds.sealing import grouped, node_ranks, path_of, seated
from rendezvous.rounds.view import JobSummary, JobView, NodeView
from rendezvous.values.job_state import Phase


def at(name: str, block: str = "", **facts: object):
    return node(name, block=block, **facts)


def test_nodes_of_one_rack_stand_together() -> None:
    racks = [at("n1", "r1"), at("n2", "r2"), at("n3", "r1"), at("n4", "r2")]
    assert order(*racks) == ["n1", "n3", "n2", "n4"]


def test_racks_of_one_pod_stand_together_too() -> None:
    nodes = [at("n1", "p1/r1"), at("n2", "p2/r3"), at("n3", "p1/r2"), at("n4", "p2/r4"), at("n5", "p1/r1")]
    assert order(*nodes) == ["n1", "n5", "n3", "n2", "n4"]


def test_a_node_without_a_place_keeps_its_own() -> None:
    assert order(at("n1", "r1"), at("n2"), at("n3", "r1")) == ["n1", "n3", "n2"]
    assert order(at("n1"), at("n2"), at("n3")) == ["n1", "n2", "n3"]


def test_an_explicit_node_rank_comes_first() -> None:
    assert order(at("n1", "r1", node_rank=2), at("n2", "r2"), at("n3", "r1"), at("n4", "r2")) == [
        *("n2", "n4", "n1", "n3"),
    ]


def test_the_schedulers_index_orders_what_the_places_leave_open() -> None:
    nodes = [
        at("a", "r1", scheduler_index=2),
        at("b", "r2", scheduler_index=0),
        at("c", "r1", scheduler_index=1),
    ]
    assert order(*nodes) == ["b", "c", "a"]


def test_a_replacement_comes_from_the_rack_of_the_node_that_was_lost() -> None:
    held = {"n1": 0, "n2": 1, "n4": 3, "n5": 4}  # ranks 2 and 5 are free
    stay = [at("n1", "r1"), at("n2", "r1"), at("n4", "r2"), at("n5", "r2")]
    assert order(*stay, at("x", "r2"), at("y", "r1"), held=held) == ["n1", "n2", "y", "n4", "n5", "x"]
    assert order(*stay, at("x"), at("y"), held=held) == ["n1", "n2", "x", "n4", "n5", "y"]


def test_ddpctl_shows_where_nodes_are_and_what_is_in_them() -> None:
    view = JobView(
        JobSummary("job", Phase.RUNNING),
        nodes=(
            NodeView("n1", block="r1", hardware="8 × H100"),
            NodeView("n2", hardware="8 × H100"),
            NodeView("n3", hardware="4 × L4"),
        ),
    )
    text = job_text(encode(view))
    assert "\n\ntopology:\n  n1 is in r1\n  n1, n2: 8 × H100\n  n3: 4 × L4" in text
    assert "topology" not in job_text(
        encode(JobView(JobSummary("job", Phase.RUNNING), nodes=(NodeView("n1"),)))
    )


_BLOCKS = st.lists(st.sampled_from(["", "a", "b", "a/1", "a/2", "b/1", "a/1/x", "/a//1/"]), max_size=12)


@given(_BLOCKS)
def test_every_group_is_in_one_piece(blocks: list[str]) -> None:
    found = grouped(range(len(blocks)), lambda index: path_of(blocks[index]))
    assert sorted(found) == list(range(len(blocks)))
    paths = [path_of(blocks[index]) for index in found]
    for length in range(1, 4):
        pieces = [path[:length] for path in paths if len(path) >= length]
        starts = [piece for before, piece in zip([(), *pieces], pieces, strict=False) if piece != before]
        assert len(starts) == len(set(starts))


@given(_BLOCKS, st.data())
def test_every_free_rank_gets_one_node(blocks: list[str], data: st.DataObject) -> None:
    names = [f"n{index}" for index in range(len(blocks))]
    before = data.draw(st.permutations(range(len(blocks))))
    held = {name: rank for name, rank in zip(names, before, strict=True) if data.draw(st.booleans())}
    ranks = node_ranks([at(name, block) for name, block in zip(names, blocks, strict=True)], held)
    assert sorted(ranks.values()) == list(range(len(blocks)))
    assert all(ranks[name] == rank for name, rank in held.items())


def test_a_large_job_is_placed_at_once() -> None:
    """The service seals a world while thousands of agents wait."""
    paths = [path_of(f"pod{index % 7}/rack{index % 113}") for index in range(4096)]
    began = time.process_time()
    assert len(seated(range(4096), {}, grouped(paths, lambda path: path))) == 4096
    assert time.process_time() - began < 20.0
