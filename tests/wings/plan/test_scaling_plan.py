"""The model of `ddp-launch plan`: its formulas against the simulation of the same, and its words."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import mean

import pytest
from played_step import play_ring, play_step

from ddp_launch_wings.plan import command, step_model, table
from ddp_launch_wings.plan.prediction import FailureModel, Question, goodput, predict
from ddp_launch_wings.plan.step_model import (
    GLOO,
    HIER,
    MIB,
    NCCL,
    BadProfile,
    Cluster,
    Gradient,
    Link,
    Profile,
    Transport,
    all_reduce,
    buckets_of,
    from_text,
    measured_link,
    merged,
    to_text,
)
from ddp_launch_wings.plan.table import node_counts, rate, seconds
from launcher.settings.arguments import UsageError

FAST = Link(1.25e10, 20e-6)
PLAIN = Transport("plain", False, False, share=1.0, message_s=0.0, collective_s=0.0, byte_s=0.0)


def profile_of(
    count: int = 40, nbytes: int = 4 * MIB, backward_s: float = 0.2, jitter: float = 0.0
) -> Profile:
    gradients = tuple(Gradient(nbytes, backward_s * (number + 1) / count) for number in range(count))
    chance = random.Random(1)
    samples = tuple(0.3 * (1 + jitter * chance.gauss(0, 1)) for _ in range(200))
    return Profile(gradients, backward_s, 0.1, samples, 1, "cpu")


def cluster_of(nodes: int, link: Link = FAST) -> Cluster:
    return Cluster(nodes, 1, link, Link(1e10, 1e-6))


def question_of(profile: Profile, **changes: object) -> Question:
    failures = FailureModel(6000 * 3600.0, 30.0, 1.0)
    asked = Question(profile, 8, FAST, Link(2e11, 3e-6), NCCL, failures, 100)
    return replace(asked, **changes)  # type: ignore[arg-type]


# --- the formulas against the simulation --------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 8, 128])
@pytest.mark.parametrize("nbytes", [4, 1 << 16, 25 * MIB])
def test_a_ring_takes_as_long_as_its_messages(nodes: int, nbytes: int) -> None:
    played = max(play_ring([0.0] * nodes, FAST, nbytes))
    assert all_reduce(cluster_of(nodes), PLAIN, nbytes) == pytest.approx(played, rel=1e-9)


@pytest.mark.parametrize("nodes", [2, 8, 32])
@pytest.mark.parametrize("bandwidth", [1e8, 1.25e9, 1.25e10])
def test_a_step_takes_as_long_as_the_simulated_one(nodes: int, bandwidth: float) -> None:
    profile, link = profile_of(), Link(bandwidth, 20e-6)
    predicted = step_model.ddp(profile, cluster_of(nodes, link), PLAIN)
    played = play_step(buckets_of(profile.gradients), [1.0] * nodes, profile.rest_s, link)
    assert predicted.seconds == pytest.approx(played, rel=0.01)


@pytest.mark.parametrize("nodes", [8, 32])
def test_the_slowest_rank_costs_as_much_as_in_the_simulation(nodes: int) -> None:
    jitter, chance = 0.05, random.Random(nodes)
    profile = profile_of(jitter=jitter)
    buckets = buckets_of(profile.gradients)
    played = mean(
        play_step(buckets, [1 + jitter * chance.gauss(0, 1) for _ in range(nodes)], profile.rest_s, FAST)
        for _ in range(20)
    )
    assert step_model.ddp(profile, cluster_of(nodes), PLAIN).seconds == pytest.approx(played, rel=0.05)


# --- what must hold for any cluster -----------------------------------------------------------------


def test_one_rank_communicates_nothing() -> None:
    step = step_model.ddp(profile_of(), cluster_of(1), GLOO)
    assert (step.exposed_s, step.communication_s, step.waiting_s) == (0.0, 0.0, 0.0)
    assert step.seconds == pytest.approx(0.3)


@pytest.mark.parametrize("transport", [GLOO, HIER, NCCL])
def test_more_nodes_and_slower_links_never_help(transport: Transport) -> None:
    profile = profile_of(jitter=0.02)
    for link in (FAST, Link(1.25e9, 20e-6), Link(1.25e8, 20e-6)):
        steps = [
            step_model.ddp(profile, Cluster(n, 4, link, Link(4e9, 1e-5)), transport).seconds
            for n in (1, 2, 8, 64)
        ]
        assert steps == sorted(steps)
    slow = step_model.ddp(profile, cluster_of(8, Link(1.25e8, 20e-6)), transport)
    assert slow.seconds > step_model.ddp(profile, cluster_of(8), transport).seconds


def test_trees_are_used_where_rings_are_slower() -> None:
    ring = replace(NCCL, has_trees=False)
    small, many = 4096, cluster_of(1024)
    assert all_reduce(many, NCCL, small) < all_reduce(many, ring, small) / 10
    large = 1 << 30
    assert all_reduce(cluster_of(2), NCCL, large) == all_reduce(cluster_of(2), ring, large)


def test_the_nodes_of_a_hierarchical_transport_send_one_copy() -> None:
    flat, levels = replace(GLOO, message_s=0.0), replace(HIER, message_s=0.0)
    two = Cluster(2, 2, Link(1.25e8, 0.0), Link(1e12, 0.0))
    ratio = all_reduce(two, levels, 1 << 26) / all_reduce(two, flat, 1 << 26)
    assert ratio == pytest.approx(2 / 3, rel=0.01)


def test_averages_every_k_micro_batches_are_divided_by_k() -> None:
    each = step_model.ddp(profile_of(), cluster_of(8, Link(1e8, 0.0)), PLAIN)
    fourth = step_model.ddp(profile_of(), cluster_of(8, Link(1e8, 0.0)), PLAIN, cadence=4)
    assert fourth.exposed_s == pytest.approx(each.exposed_s / 4)


def test_methods_that_send_less_win_where_the_link_is_slow() -> None:
    question = question_of(profile_of(), link=Link(2.5e6, 0.02), transport=GLOO, ranks_per_node=1)
    (last,) = predict(question, (8,))
    assert last.best_method == "DiLoCo"
    (near,) = predict(question_of(profile_of()), (2,))
    assert near.best_method == "DDP"


# --- parts ------------------------------------------------------------------------------------------


def test_buckets_close_with_the_gradient_that_reaches_the_limit() -> None:
    gradients = [
        Gradient(MIB // 2, 0.1),
        Gradient(MIB, 0.2),
        Gradient(20 * MIB, 0.3),
        Gradient(9 * MIB, 0.4),
        Gradient(8, 0.5),
    ]
    sizes = [(bucket.nbytes, bucket.ready_s) for bucket in buckets_of(gradients)]
    assert sizes == [(3 * MIB // 2, 0.2), (29 * MIB, 0.4), (8, 0.5)]
    assert len(buckets_of(gradients, cap_mb=400.0)) == 2


def test_the_slowest_of_many_is_the_expected_maximum() -> None:
    chance = random.Random(5)
    samples = [chance.gauss(1.0, 0.1) for _ in range(4000)]
    maxima = mean(max(chance.gauss(1.0, 0.1) for _ in range(64)) for _ in range(2000)) - 1.0
    assert step_model.slowest(samples, 64) == pytest.approx(maxima, rel=0.06)


def test_the_best_interval_between_checkpoints_is_the_best() -> None:
    model = FailureModel(1e6, 60.0, 5.0)
    best = goodput(model, 16)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert (
            goodput(replace(model, checkpoint_every_s=best.checkpoint_every_s * factor), 16).share
            < best.share
        )
    assert goodput(model, 1).share > best.share > goodput(model, 256).share


def test_a_link_is_fitted_to_measured_all_reduces() -> None:
    link = Link(3e9, 8e-6)
    points = tuple((size, 6 * link.message(size / 4)) for size in (4, 1 << 16, 1 << 26))
    fitted = measured_link(points, 4)
    assert (fitted.bandwidth, fitted.latency_s) == (
        pytest.approx(3e9, rel=0.01),
        pytest.approx(8e-6, rel=0.01),
    )


def test_an_all_reduce_inside_a_node_takes_as_long_as_it_was_measured() -> None:
    """Small and large ones follow different curves: through a cache, through memory, in one piece or in several."""
    points = ((4, 1e-5), (1 << 16, 4e-5), (1 << 20, 9e-4), (1 << 26, 2e-1))
    cluster = Cluster(1, 4, FAST, measured_link(points, 4))
    for nbytes, taken in points:
        assert all_reduce(cluster, PLAIN, nbytes) == pytest.approx(taken)
    between = all_reduce(cluster, PLAIN, (1 << 16) + (1 << 20) / 2 - (1 << 15))
    assert between == pytest.approx((4e-5 + 9e-4) / 2)
    assert all_reduce(cluster, PLAIN, 1 << 27) == pytest.approx(4e-1, rel=0.01)
    assert all_reduce(cluster, PLAIN, 1) == pytest.approx(1e-5)


def test_the_median_rank_is_the_profile_and_all_samples_count() -> None:
    records = [
        {"device": "cpu", "gradients": [[8, 0.3], [4, 0.1]], "steps": [pace, pace + 0.2], "inside": []}
        for pace in (1.0, 3.0, 2.0)
    ]
    found = merged(records)
    assert found.gradients == (Gradient(4, 0.1), Gradient(8, 0.3))
    assert (found.backward_s, found.rest_s) == (0.3, pytest.approx(2.1 - 0.3))
    assert (len(found.step_samples), found.ranks) == (6, 3)


# --- text and files -----------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written() -> None:
    profile = replace(profile_of(jitter=0.1), inside=((4, 1e-5), (1024, 2e-5)), ranks=2)
    assert from_text(to_text(profile)) == profile


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "gradients": 3}', "\x00"])
def test_a_file_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(BadProfile):
        from_text(text)


def test_an_empty_profile_is_refused() -> None:
    with pytest.raises(BadProfile, match="no gradients"):
        from_text(to_text(replace(profile_of(), gradients=())))


def test_units() -> None:
    assert (rate("--link", "100gbit"), rate("--inside", "300GB/s")) == (1.25e10, 3e11)
    assert (seconds("--latency", "20us"), seconds("--restart", "1.5m")) == (pytest.approx(2e-5), 90.0)
    assert node_counts("--nodes", "6") == (1, 2, 4, 6)
    assert node_counts("--nodes", "16,1,4") == (1, 4, 16)


@pytest.mark.parametrize(
    "words",
    [
        ["--link", "fast", "train.py"],
        ["--link", "0gbit", "train.py"],
        ["--nodes", "0", "train.py"],
        ["--nodes", "1,x", "train.py"],
        ["--nodes", "100001", "train.py"],
        ["--ranks-per-node", "-1", "train.py"],
        ["--steps", "2", "train.py"],
        ["--diloco-every", "0", "train.py"],
        ["--transport", "carrier", "train.py"],
        ["--unknown", "train.py"],
        ["--node-mtbf", "soon", "train.py"],
        ["--profile", "no/such/file"],
        ["--profile", "a", "train.py"],
        [],
    ],
)
def test_wrong_words_end_with_one_line(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        command.run(words, {}, print)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_says_what_was_asked_and_how_right_it_is() -> None:
    question = question_of(profile_of(jitter=0.02))
    predictions = predict(question, (1, 4, 10_000))
    text = table.text(question, predictions)
    assert "100 Gbit/s" in text
    assert "80,000" in text
    assert "No run has checked the constants of nccl" in text
    checked = replace(question, transport=replace(GLOO, error=0.08, checked="2 to 4 hosts"))
    assert "at most 8%" in table.text(checked, predictions)
    json.dumps(table.as_values(question, predictions))
