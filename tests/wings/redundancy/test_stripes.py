"""Placement: which node keeps what, with which redundancy, and what is lost when nodes are."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from ddp_launch_wings.redundancy import placement
from ddp_launch_wings.redundancy.placement import (
    Code,
    Place,
    Redundancy,
    chunk_bytes,
    chunk_range,
    layout,
    weak_domains,
)
from launcher.settings import values


def places(nodes: int, ranks: int = 1, domains: int = 0) -> list[Place]:
    return [
        Place(f"n{node:03}", (f"d{node % domains}",) if domains else ())
        for node in range(nodes)
        for _rank in range(ranks)
    ]


CODES = [Code(1, 1), Code(1, 2), Code(2, 1), Code(3, 1), Code(2, 2), Code(6, 2), Code(5, 3)]


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_chunk_is_in_one_stripe_and_each_stripe_on_as_many_nodes_as_chunks(
    code: Code, ranks: int
) -> None:
    for n_nodes in range(code.n_nodes, 2 * code.n_nodes + 5):
        where = places(n_nodes, ranks)
        stripes = layout(where, code)
        met = [(rank, chunk) for each in stripes for chunk, rank in enumerate(each.data)]
        assert sorted(met) == list(itertools.product(range(len(where)), range(code.k)))
        held = [rank for each in stripes for rank in each.parity]
        assert sorted(held) == sorted(list(range(len(where))) * code.m)  # memory is equal on all ranks
        for each in stripes:
            nodes = {where[rank].node for rank in (*each.data, *each.parity) if rank is not None}
            assert len(nodes) == code.n_nodes
        assert [each.number for each in stripes] == list(range(len(stripes)))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_no_set_of_m_lost_nodes_takes_more_than_m_chunks_of_a_stripe(code: Code) -> None:
    where = places(code.n_nodes + 2)
    stripes = layout(where, code)
    for gone in itertools.combinations(range(len(where)), code.m):
        assert all(sum(rank in gone for rank in (*each.data, *each.parity)) <= code.m for each in stripes)


def test_nodes_with_different_numbers_of_ranks() -> None:
    where = [Place(name) for name in ("a", "a", "a", "b", "c", "c", "d")]
    stripes = layout(where, Code(2, 1))
    for rank in range(len(where)):
        chunks = [chunk for each in stripes for chunk, member in enumerate(each.data) if member == rank]
        assert sorted(chunks) == [0, 1], rank
    for each in stripes:
        nodes = [where[rank].node for rank in (*each.data, *each.parity) if rank is not None]
        assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize(
    ("racks", "per_rack", "code"), [(4, 2, Code(3, 1)), (8, 4, Code(6, 2)), (6, 3, Code(4, 2))]
)
def test_a_whole_rack_may_be_lost_if_there_are_enough_racks(racks: int, per_rack: int, code: Code) -> None:
    where = places(racks * per_rack, domains=racks)
    stripes = layout(where, code)
    for rack in range(racks):
        for each in stripes:
            inside = [rank for rank in (*each.data, *each.parity) if where[rank or 0].domain == (f"d{rack}",)]
            assert len(inside) <= code.m
    assert not weak_domains(where, stripes, code.m)


def test_units_that_are_too_large_are_named() -> None:
    where = [Place(f"n{i}", ("pod", "rack0" if i < 4 else f"rack{i}", f"host{i}")) for i in range(8)]
    assert weak_domains(where, layout(where, Code(6, 2)), 2) == (("pod", "rack0"),)
    alone = [Place(f"n{i}", ("host",)) for i in range(8)]
    assert not weak_domains(alone, layout(alone, Code(6, 2)), 2)


def test_chunks_cover_an_image() -> None:
    numbers = random.Random(1)
    for _ in range(500):
        n_bytes, k = numbers.randrange(1, 5000), numbers.randrange(1, 12)
        ranges = [chunk_range(n_bytes, k, chunk) for chunk in range(k)]
        assert [ranges[0][0], *(end for _begin, end in ranges)] == [
            *(begin for begin, _end in ranges),
            n_bytes,
        ]
        assert all(end - begin <= chunk_bytes(n_bytes, k) for begin, end in ranges)
        assert chunk_bytes(n_bytes, k) < n_bytes / k + 64


def test_the_text_of_the_option() -> None:
    assert placement.parse("none") is placement.parse("") is None
    assert placement.parse("auto") == Redundancy(None)
    assert placement.parse("copies:2") == Redundancy(Code(1, 2))
    assert placement.parse("code:6+2") == Redundancy(Code(6, 2))
    assert [str(code) for code in (Code(1, 2), Code(6, 2))] == ["copies:2", "code:6+2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("copies", "use none, auto, copies:N"),
        ("code:6", "use none, auto"),
        ("code:0+2", "numbers begin at 1"),
        ("code:2+0", "numbers begin at 1"),
        ("copies:0", "numbers begin at 1"),
        ("code:250+7", "at most 256 nodes"),
        ("Code:6+2", "invalid redundancy 'Code:6+2'"),
    ],
)
def test_texts_without_a_meaning(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        placement.parse(text)


@pytest.mark.parametrize(
    ("asked", "n_nodes", "expected", "words"),
    [
        ("code:6+2", 8, "code:6+2", ""),
        ("code:6+2", 100, "code:6+2", ""),
        ("code:6+2", 5, "code:3+2", "needs 8 nodes, and the ranks of a State are on 5"),
        ("code:6+2", 2, "copies:1", "survives the loss of 1 node and needs 2.00 times the memory"),
        ("copies:3", 3, "copies:2", "copies:3 needs 4 nodes"),
        ("auto", 2, "copies:1", ""),
        ("auto", 3, "copies:1", ""),
        ("auto", 5, "code:4+1", ""),
        ("auto", 64, "code:6+2", ""),
    ],
)
def test_what_fits_a_job(asked: str, n_nodes: int, expected: str, words: str) -> None:
    wanted = placement.parse(asked)
    assert wanted is not None
    code, message = placement.fitting(wanted, n_nodes)
    assert str(code) == expected
    assert (words in message) if words else not message


def test_one_node_has_no_other() -> None:
    code, message = placement.fitting(Redundancy(Code(1, 1)), 1)
    assert code is None
    assert "resumes from disk" in message


GOOD = ("none", "auto", "copies:1", "copies:255", "code:6+2", "code:254+2")
BAD = ("copies", "code:6", "code:0+2", "code:2+0", "copies:0", "copies:256", "code:250+7", "x")


@pytest.mark.parametrize("text", GOOD + BAD)
def test_launcher_and_ranks_accept_the_same_texts(text: str) -> None:
    if text in GOOD:
        placement.parse(text)
        assert values.redundancy(text) == text
    else:
        with pytest.raises(ValueError, match="redundancy"):
            placement.parse(text)
        with pytest.raises(values.BadValue):
            values.redundancy(text)
