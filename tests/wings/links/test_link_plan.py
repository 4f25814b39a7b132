"""Who measures with whom, and who is named for it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_launch_wings.links.link_plan import (
    Baseline,
    MeasuredLink,
    better_of,
    checks_of,
    in_rounds,
    is_bad,
    judge,
    schedule,
    suspects,
)
from launcher.preflight.checkup import Grade

GBIT = 1e9
NODES = st.integers(3, 200)
ALL_PAIRS_UP_TO = 20


def pairs_of(n):
    return [pair for pairs in schedule(n) for pair in pairs]


def names(n):
    return {rank: f"node{rank}" for rank in range(n)}


def apart(n):
    return {rank: f"host{rank}" for rank in range(n)}


def network(n, seed, slow=lambda pair: False, how="rate"):
    """What the nodes of a network with one fault measure: never the same twice, and never twice as slow by chance."""
    chance = random.Random(seed)
    links = []
    for pair in pairs_of(n):
        there, back = (10 * GBIT * chance.uniform(0.7, 1.0) for _ in range(2))
        rtt = 0.0001 * chance.uniform(1.0, 2.0)
        if slow(pair):
            there, rtt = (there / 5, rtt) if how == "rate" else (there, rtt + 0.005)
        problem = "no answer" if slow(pair) and how == "cut" else ""
        links.append(MeasuredLink(pair, there, back, rtt, problem))
    return links


# --- the plan ------------------------------------------------------------------------------------------


@given(st.integers(2, 400))
@settings(max_examples=50, deadline=None)
def test_a_round_takes_nobody_twice_and_no_pair_meets_twice(n):
    rounds = schedule(n)
    for pairs in rounds:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
        assert all(0 <= end < n for end in ends)
    met = [frozenset(pair) for pair in pairs_of(n)]
    assert len(met) == len(set(met))


@pytest.mark.parametrize("n", range(2, ALL_PAIRS_UP_TO + 1))
def test_small_jobs_measure_every_link(n):
    assert {frozenset(pair) for pair in pairs_of(n)} == {
        frozenset(p) for p in itertools.combinations(range(n), 2)
    }


@given(st.integers(2, 2000))
@settings(max_examples=25, deadline=None)
def test_rounds_grow_with_the_logarithm_and_everyone_has_many_partners(n):
    rounds = schedule(n)
    assert len(rounds) <= 4 * (n - 1).bit_length()
    partners = dict.fromkeys(range(n), 0)
    for pair in pairs_of(n):
        for end in pair:
            partners[end] += 1
    assert min(partners.values()) >= len(rounds) - 1  # with an odd number, one sits out each round


def test_one_node_measures_nothing():
    assert schedule(1) == ()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), unique=True), st.integers(1, 5))
def test_repeated_measurements_keep_apart(pairs, at_once):
    rounds = in_rounds(pairs, at_once)
    assert sorted(pair for taken in rounds for pair in taken) == sorted(pairs)
    for taken in rounds:
        assert len(taken) <= at_once
        ends = [end for pair in taken for end in pair]
        assert len(ends) == len(set(ends))


# --- the verdict ---------------------------------------------------------------------------------------


@given(NODES, st.data(), st.sampled_from(["rate", "latency", "cut"]), st.integers())
@settings(max_examples=80, deadline=None)
def test_one_slow_node_is_found_and_nobody_else(n, data, how, seed):
    guilty = data.draw(st.integers(0, n - 1))
    links = network(n, seed, lambda pair: guilty in pair, how)
    found = judge(links, apart(n))
    assert [node.node for node in found.nodes] == [guilty]
    assert found.links == ()
    assert found.nodes[0].unreachable == (how == "cut")


@given(NODES, st.data(), st.sampled_from(["rate", "latency", "cut"]), st.integers())
@settings(max_examples=80, deadline=None)
def test_one_slow_link_that_was_measured_is_found_and_no_node_is_blamed(n, data, how, seed):
    bad = data.draw(st.sampled_from(pairs_of(n)))
    links = network(n, seed, lambda pair: pair == bad, how)
    found = judge(links, apart(n))
    assert found.nodes == ()
    assert [link.pair for link in found.links] == [bad]
    assert suspects(links, apart(n)) == (bad,)
    assert suspects(links, apart(n), again=True) in ((), (bad,))


@given(NODES, st.integers())
@settings(max_examples=60, deadline=None)
def test_on_a_sound_network_nobody_is_suspected(n, seed):
    links = network(n, seed)
    assert suspects(links, apart(n)) == ()
    found = judge(links, apart(n))
    assert (found.nodes, found.links) == ((), ())


def test_two_nodes_have_nobody_to_be_compared_with():
    links = [MeasuredLink((1, 0), 1e8, 1e8, 0.001)]
    assert suspects(links, apart(2)) == ()
    (check,) = checks_of(0, judge(links, apart(2)), names(2))
    assert check.grade is Grade.OK
    assert "100 Mbit/s" in check.found


def test_a_network_that_is_slow_as_a_whole_blames_no_node():
    links = [MeasuredLink(pair, 20e6, 20e6, 0.001) for pair in pairs_of(4)]
    found = judge(links, apart(4))
    assert found.nodes == ()
    checks = [checks_of(rank, found, names(4)) for rank in range(4)]
    assert {(c.grade, c.advice) for (c,) in checks} == {
        (Grade.WARN, "the whole network is slow: check that it is the right one (--interface)")
    }


def test_agents_on_one_host_do_not_measure_a_network_but_miss_each_other_all_the_same():
    hosts = {0: "a", 1: "a", 2: "b"}
    loopback, quick, slow = (
        MeasuredLink((1, 0), 90e9, 90e9, 1e-5),
        MeasuredLink((2, 0), 9e9, 9e9, 1e-4),
        MeasuredLink((2, 1), 9e9, 9e9, 1e-4),
    )
    assert judge([loopback, quick, slow], hosts).baseline == Baseline(9e9, 1e-4)
    found = judge([MeasuredLink((1, 0), problem="no answer"), quick, slow], hosts)
    assert [link.pair for link in found.links] == [(1, 0)]
    (check,) = checks_of(0, judge([loopback], {0: "a", 1: "a"}), names(2))
    assert (check.grade, check.found) == (Grade.SKIPPED, "all nodes are on one host")


def test_of_a_broken_link_one_end_gives_way_and_both_know():
    links = [
        MeasuredLink(pair, 9e9, 9e9, 1e-4, "no answer" if pair in ((1, 3), (3, 1)) else "")
        for pair in pairs_of(4)
    ]
    found = judge(links, apart(4))
    first = [checks_of(rank, found, names(4))[0] for rank in range(4)]
    assert [check.grade for check in first] == [Grade.OK, Grade.WARN, Grade.OK, Grade.FAIL]
    assert first[1].found == "the link to node3: no answer; other links have 9 Gbit/s"
    elsewhere = checks_of(0, found, names(4))[1]
    assert elsewhere.found in ("between node1 and node3: no answer", "between node3 and node1: no answer")
    assert elsewhere.grade is Grade.OK


def test_a_node_is_left_out_only_if_it_is_slow_enough_to_be_better_off_without():
    best = Baseline(10 * GBIT, 1e-4)
    assert not is_bad(MeasuredLink((0, 1), 2.5 * GBIT, 9 * GBIT, 1e-4), best)
    assert is_bad(MeasuredLink((0, 1), 1.5 * GBIT, 9 * GBIT, 1e-4), best)
    assert not is_bad(MeasuredLink((0, 1), 9 * GBIT, 9 * GBIT, 0.005), best)
    assert is_bad(MeasuredLink((0, 1), 9 * GBIT, 9 * GBIT, 0.05), best)


def test_a_second_measurement_acquits_and_does_not_accuse():
    disturbed, quiet, failed = (
        MeasuredLink((0, 1), 1e9, 1e9, 0.01),
        MeasuredLink((0, 1), 9e9, 8e9, 0.02),
        MeasuredLink((0, 1), problem="no answer"),
    )
    assert better_of(disturbed, quiet) == MeasuredLink((0, 1), 9e9, 8e9, 0.01)
    assert better_of(quiet, disturbed) == MeasuredLink((0, 1), 9e9, 8e9, 0.01)
    assert better_of(failed, quiet) == better_of(quiet, failed) == quiet
