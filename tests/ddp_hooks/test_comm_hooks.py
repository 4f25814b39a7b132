"""Our communication hooks, in real ranks: what they lose is bounded, what they owe is paid, models learn."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import hook_trials as trials
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp import DistributedDataParallel
from ddp.comm_hooks import Gossip, PowerSGD, Quantized, TopK
from ddp.comm_hooks.gossip import Topology, partners

if TYPE_CHECKING:
    from collections.abc import Callable

    from crew import Crew

    CrewOf = Callable[..., Crew]

BACKENDS = [("gloo", 3), ("shm", 2), ("hier", 2)]
AVERAGING = [name for name in trials.HOOKS if name not in ("gossip", "noop")]


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
@pytest.mark.parametrize("hook", AVERAGING)
def test_models_learn_and_replicas_stay_the_same(crew_of: CrewOf, hook: str, backend: str, size: int) -> None:
    for before, after, same in crew_of(backend, size).run(trials.learns, hook, "ours"):
        assert same
        assert after < 0.5 * before


@pytest.mark.parametrize("hook", ["power", "quantized_chunks", "top_k", "fp16_power"])
def test_models_learn_under_torchs_class(crew_of: CrewOf, hook: str) -> None:
    for before, after, same in crew_of("gloo", 3).run(trials.learns, hook, "torch"):
        assert same
        assert after < 0.5 * before


@pytest.mark.parametrize("which", ["ours", "torch"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("hook", ["all_reduce", "fp16", "bf16_all_reduce"])
def test_a_failed_collective_raises(crew_of: CrewOf, hook: str, backend: str, which: str) -> None:
    assert crew_of(backend, 2).run(trials.alone, hook, which) == [True, False]


@pytest.mark.parametrize("hook", AVERAGING)
def test_both_classes_give_the_same(crew_of: CrewOf, hook: str) -> None:
    tolerance = {"top_k": 1e-6, "quantized": 2e-3, "quantized_chunks": 2e-3}.get(hook, 1e-3)
    for differences in crew_of("gloo", 3).run(trials.ours_and_torchs, hook):
        assert differences[0] < tolerance


@pytest.mark.parametrize(
    ("hook", "share"),
    # A rounding to 11 and to 8 bits; half a level of 127 both ways, with a scale that three ranks may make larger.
    [
        ("all_reduce", 1e-6),
        ("fp16", 2**-10),
        ("bf16", 2**-6),
        ("quantized", 4 / 127),
        ("quantized_chunks", 8 / 127),
    ],
)
def test_what_is_lost_is_bounded(crew_of: CrewOf, hook: str, share: float) -> None:
    for found in crew_of("gloo", 3).run(trials.distance_from_the_average, hook):
        for error, largest, same in found:
            assert same
            assert error <= share * largest
            assert hook == "all_reduce" or error > 0  # it was compressed


@pytest.mark.parametrize("trial", [trials.full_rank, trials.all_of_the_elements])
def test_nothing_is_lost_where_all_is_sent(crew_of: CrewOf, trial: Any) -> None:
    assert max(crew_of("gloo", 3).run(trial)) < 1e-5


@pytest.mark.parametrize("which", ["ours", "torch"])
@pytest.mark.parametrize("hook", list(trials.FEEDBACK))
def test_what_is_held_back_is_owed(crew_of: CrewOf, hook: str, which: str) -> None:
    for difference, kept in crew_of("gloo", 3).run(trials.nothing_is_lost, hook, which):
        assert difference < 1e-5
        assert kept > 10 * difference


@pytest.mark.parametrize("hook", ["power", "quantized_chunks", "top_k"])
def test_a_saved_state_goes_on_as_before(crew_of: CrewOf, hook: str) -> None:
    for step, same in crew_of("gloo", 2).run(trials.goes_on_as_before, hook):
        assert step == 7
        assert same


def test_a_state_of_another_model_is_refused(crew_of: CrewOf) -> None:
    with pytest.raises(AssertionError, match=r"WrongValue.*'0\.weight'"):
        crew_of("gloo", 2).run(trials.of_another_model, "power")


@pytest.mark.parametrize("hook", ["fp16", "power", "quantized", "top_k"])
@pytest.mark.parametrize(
    ("kind", "which", "named"),
    [
        ("complex", "ours", r"'odd'.*torch.complex64"),
        ("sparse", "ours", r"'odd.weight'.*sparse"),
        ("sparse", "torch", r"\[7, 4\].*sparse"),
    ],
)
def test_what_a_hook_cannot_average_is_named(
    crew_of: CrewOf, hook: str, kind: str, which: str, named: str
) -> None:
    crew = crew_of("gloo", 2)
    crew.tell(trials.refused, hook, kind, which)
    for answer in crew.answers():
        assert answer.kind == ("WrongType" if which == "ours" else answer.kind)
        assert re.search(named, answer.text), answer.text


@pytest.mark.parametrize("hook", ["fp16", "power", "quantized_chunks", "top_k"])
def test_an_overflow_is_seen_and_not_kept(crew_of: CrewOf, hook: str) -> None:
    assert crew_of("gloo", 2).run(trials.overflow_is_seen_and_forgotten, hook) == [(True, True)] * 2


@pytest.mark.parametrize("hook", ["power", "quantized"])
def test_the_last_bucket_comes_though_it_is_unused(crew_of: CrewOf, hook: str) -> None:
    if "skip_all_reduce_unused_params" not in inspect.signature(DistributedDataParallel).parameters:
        pytest.skip("this torch skips no buckets")
    assert crew_of("gloo", 2).run(trials.every_bucket_comes, hook) == [(True, True)] * 2


@pytest.mark.parametrize("hook", ["all_reduce", "fp16", "power", "quantized_chunks", "top_k"])
def test_models_of_bfloat16(crew_of: CrewOf, hook: str) -> None:
    for distance, same in crew_of("gloo", 2).run(trials.half_precision, hook):
        assert same
        assert distance < (1.2 if hook in ("top_k", "power") else 0.05)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("shm", 2), ("hier", 2)])
def test_gossip_is_the_mean_of_two(crew_of: CrewOf, backend: str, size: int) -> None:
    assert crew_of(backend, size).run(trials.gossips) == [([True] * 5, 5)] * size


def test_gossip_makes_models_learn(crew_of: CrewOf) -> None:
    for before, after, same in crew_of("gloo", 3).run(trials.learns, "gossip", "ours"):
        assert not same  # it is gossip, not an average
        assert after < 0.5 * before


def test_without_communication_replicas_drift_apart(crew_of: CrewOf) -> None:
    assert [same for _, _, same in crew_of("shm", 2).run(trials.learns, "noop", "ours", 3)] == [False] * 2


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_who_is_sent_to_hears(size: int, step: int, seed: int) -> None:
    pairs = [partners(Topology.DISSEMINATION, size, rank, step, seed) for rank in range(size)]
    for rank, (to, source) in enumerate(pairs):
        assert pairs[to][1] == rank
        assert pairs[source][0] == rank
        assert size == 1 or to != rank


@pytest.mark.parametrize("topology", list(Topology))
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_after_a_round_all_have_heard_all(topology: Topology, size: int) -> None:
    mixed = torch.eye(size, dtype=torch.float64)
    for step in range(3 * (size.bit_length() - 1), 4 * (size.bit_length() - 1)):
        rows = [(mixed[r] + mixed[partners(topology, size, r, step, 1)[1]]) / 2 for r in range(size)]
        mixed = torch.stack(rows)
    assert torch.equal(mixed, torch.full((size, size), 1 / size, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PowerSGD(rank=0), "rank=0"),
        (lambda: PowerSGD(start_step=-1), "start_step=-1"),
        (lambda: Quantized(chunk=2), "chunk=2"),
        (lambda: TopK(share=0), "share=0"),
        (lambda: Gossip(topology="ring"), "ring"),
        (lambda: partners(Topology.CUBE, 6, 0, 0, 0), "'cube'.* 6 "),
    ],
)
def test_settings_that_cannot_work(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
