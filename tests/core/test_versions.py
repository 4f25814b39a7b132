"""Nodes with other versions than most."""

from __future__ import annotations

from dataclasses import replace

from rendezvous.diagnosing.versions import arguments_warning, differences, prevents_training, warning
from rendezvous.values.types import AgentId, NodeFacts, Placement, World


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
