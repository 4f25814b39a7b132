from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.diagnosing.versions import arguments_warning, differences, prevents_training, warning
from rendezvous.values.durations import duration_text, seconds_in
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.types import AgentId, NodeFacts, Placement, World

_CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh") | st.text(max_size=3), st.none() | st.integers()))


@given(changes=_CHANGES)
def test_it_says_what_a_dict_would_and_never_changes(changes: list[tuple[str, int | None]]) -> None:
    plain: dict[str, int] = {}
    frozen: FrozenMap[str, int] = FrozenMap()
    for key, value in changes:
        before, frozen_before = dict(plain), frozen
        if value is None:
            plain.pop(key, None)
            frozen = frozen.minus(key)
        else:
            plain[key] = value
            frozen = frozen.plus(key, value)
        assert dict(frozen_before.items()) == before
        assert dict(frozen.items()) == plain
        assert len(frozen) == len(plain)
        assert frozen == FrozenMap(plain.items())
        assert hash(frozen) == hash(FrozenMap(plain.items()))
        assert (key in frozen) == (key in plain)
        assert frozen.get(key, -1) == plain.get(key, -1)
    assert len(EMPTY) == 0


def test_order_does_not_depend_on_the_seed_of_string_hashes() -> None:
    """As it was under other seeds; a set of these names comes out in another order each time."""
    names = [f"node{i}" for i in range(5)]
    assert list(FrozenMap((n, 0) for n in names)) == ["node1", "node4", "node0", "node3", "node2"]


# --- durations are read and written in one way --------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5h", 5400.0),
        ("20us", 20e-6),
        ("2min", 120.0),
        ("2m", 120.0),
        (" 3 d ", 259_200.0),
        ("-1s", -1.0),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert seconds_in(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5 weeks", "1e3", "5mm", "٣s", "9" * 60, "inf", "nan"])
def test_what_is_not_a_duration_is_known(text: str) -> None:
    assert seconds_in(text) is None


def test_a_duration_is_written() -> None:
    assert [duration_text(each) for each in (2.54, 119.0, 600.0, 7800.0)] == [
        "2.5 s",
        "119.0 s",
        "10 min",
        "2 h 10 min",
    ]


# --- nodes with other versions than most --------------------------------------------------------------


def world(*told):
    return World(
        1,
        tuple(
            Placement(AgentId(f"n{at}", "1"), NodeFacts(f"n{at}", "10.0.0.1", 1, versions=text), at, at, at)
            for at, text in enumerate(told)
        ),
    )


def test_nodes_alike_are_no_news():
    assert warning(world("torch=2.13.0 python=3.11.7", "torch=2.13.0 python=3.11.7")) == ""
    assert warning(world("", "")) == ""


def test_the_odd_one_is_named_whatever_its_place():
    odd, usual = "torch=2.4.0 python=3.11.7", "torch=2.13.0 python=3.11.7"
    assert "n0 has torch 2.4.0 (most nodes: 2.13.0)" in warning(world(odd, usual, usual))
    assert "n2 has torch 2.4.0 (most nodes: 2.13.0)" in warning(world(usual, usual, odd))


def test_who_says_nothing_of_it_is_not_compared():
    assert warning(world("torch=2.13.0 nccl=2.27.3", "torch=2.13.0", "")) == ""


def test_many_are_counted():
    told = ["python=3.11.7"] * 7 + ["python=3.12.1"] * 6
    assert "n7, n8, n9, n10 and 2 more have python 3.12.1 (most nodes: 3.11.7)" in warning(world(*told))


def test_what_keeps_ranks_from_working_together():
    def of(mine, usual):
        return [prevents_training(each) for each in differences([("a", usual), ("b", usual), ("c", mine)])]

    assert of("torch=2.13.1", "torch=2.13.0") == [False]
    assert of("torch=2.12.0", "torch=2.13.0") == [True]
    assert of("nccl=2.27.3", "nccl=2.27.5") == [True]
    assert of("python=3.12.0 driver=570.1", "python=3.11.0 driver=580.2") == [False, False]


def with_args(*digests: str) -> World:
    alike = world(*[""] * len(digests))
    facts = [replace(p.facts, script_args=each) for p, each in zip(alike.placements, digests, strict=True)]
    return replace(
        alike, placements=tuple(replace(p, facts=f) for p, f in zip(alike.placements, facts, strict=True))
    )


def test_nodes_with_other_arguments_of_the_script_are_named():
    assert arguments_warning(with_args("a", "a")) == ""
    assert arguments_warning(with_args("", "a")) == ""  # an older node does not report them
    assert "n1" in arguments_warning(with_args("a", "b"))
    named = arguments_warning(with_args("b", "a", "a"))
    assert named.startswith("n0 ")
    assert "2 nodes" in named
