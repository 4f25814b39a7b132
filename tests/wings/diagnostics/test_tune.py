from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.reducer.plan import MIB, BucketPlan, ParameterInfo, Transport, limits, rebuilt_plan
from ddp_launch_wings.diagnostics import bucket_search, timeline
from ddp_launch_wings.diagnostics.timeline import BucketTimes, StepTimes, TimeSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT = limits(25 * MIB, MIB, [], whole_at_first=True)
LATENCY_S = 0.001


def facts(megabytes: Sequence[float]) -> list[ParameterInfo]:
    sizes = [int(each * MIB / 4) for each in megabytes]
    return [ParameterInfo(f"p{i}", (n,), (1,), "torch.float32", "cpu", 4) for i, n in enumerate(sizes)]


def linear(seconds_per_mib: float, latency: float = LATENCY_S) -> bucket_search.Curve:
    return bucket_search.Curve(tuple((n * MIB, latency + n * seconds_per_mib) for n in (1, 4, 64)))


def planned(parameters: Sequence[ParameterInfo], cap_mib: int) -> BucketPlan:
    limit = limits(cap_mib * MIB, cap_mib * MIB, [], whole_at_first=True)
    return rebuilt_plan(parameters, range(len(parameters)), limit, Transport(in_place=False))


def test_a_curve_goes_through_its_points_and_on_beyond_them() -> None:
    curve = bucket_search.Curve(((100, 1.0), (200, 2.0), (400, 3.0)))
    assert [curve.seconds(n) for n in (0, 100, 150, 200, 300, 400, 600)] == [1, 1, 1.5, 2, 2.5, 3, 4]
    assert bucket_search.Curve(((100, 1.0),)).seconds(1000) == 1.0


def test_a_curve_never_promises_less_than_what_was_measured() -> None:
    """A larger one that happened to be quicker: noise."""
    assert bucket_search.Curve(((100, 2.0), (200, 1.0))).seconds(10_000) == 1.0


def test_sizes_to_measure_end_with_the_model() -> None:
    assert bucket_search.sizes_to_measure(0) == [1 << 14, 1 << 16]
    assert bucket_search.sizes_to_measure(10 * MIB) == [1 << n for n in (14, 16, 18, 20, 22)] + [10 * MIB]
    assert bucket_search.sizes_to_measure(10_000 * MIB)[-1] == 64 * MIB


def test_what_is_exposed_is_what_outlasts_the_computing() -> None:
    """Four of 4 MiB that arrive a second apart; 4 MiB take 0.401 s. Bucket by bucket all but the last are hidden."""
    parameters = facts([4, 4, 4, 4])
    seen = bucket_search.GradientTimes((1.0, 2.0, 3.0, 4.0), 4.0)
    each, whole = planned(parameters, 4), planned(parameters, 16)
    curve = linear(0.1)
    assert len(each.buckets) == 4
    assert len(whole.buckets) == 1
    of_each = bucket_search.exposed(each, parameters, seen, curve)
    assert of_each == pytest.approx(0.401 + 4 * bucket_search.BUCKET_OVERHEAD_S)
    assert bucket_search.exposed(whole, parameters, seen, curve) == pytest.approx(
        1.601 + bucket_search.BUCKET_OVERHEAD_S
    )


def test_small_buckets_where_they_hide_and_large_ones_where_each_costs() -> None:
    parameters = facts([2.0] * 20)
    slowly = bucket_search.GradientTimes(tuple(0.1 * i for i in range(20)), 1.9)
    at_once = bucket_search.GradientTimes((0.0,) * 20, 0.0)
    order, transport = range(20), Transport(in_place=False)
    hide = bucket_search.candidates(parameters, order, DEFAULT, transport, slowly, linear(0.01, 1e-5))
    few = bucket_search.candidates(parameters, order, DEFAULT, transport, at_once, linear(1e-5, 0.1))
    assert hide[0].largest <= 4 * MIB
    assert few[0].largest >= 50 * MIB


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 60.0), min_size=1, max_size=30), st.booleans())
def test_candidates_differ_from_the_default_and_from_each_other(sizes: list[float], in_place: bool) -> None:
    parameters = facts(sizes)
    order, transport = range(len(sizes)), Transport(lists=in_place, in_place=in_place)
    seen = bucket_search.GradientTimes(tuple(0.01 * i for i in order), 0.01 * len(sizes))
    found = bucket_search.candidates(parameters, order, DEFAULT, transport, seen, linear(0.001))
    plans = [rebuilt_plan(parameters, order, limit, transport) for limit in [DEFAULT, *found]]
    assert len(found) <= bucket_search.CANDIDATES
    assert all(plans.count(plan) == 1 for plan in plans)


def test_a_trial_gives_every_plan_the_same_number_of_turns_and_counted_steps() -> None:
    trial, counted, turns = bucket_search.Trial(3), [0, 0, 0], []
    while not trial.over:
        if trial.changes:
            turns.append(trial.plan)
        counted[trial.plan] += trial.counts
        trial = trial.next_step()
    assert turns == [0, 1, 2] * bucket_search.TURNS
    assert counted == [bucket_search.TURNS * (bucket_search.STEPS - bucket_search.UNCOUNTED)] * 3


def test_kept_is_what_is_faster_on_the_slowest_rank_by_more_than_noise() -> None:
    assert bucket_search.choose_plan([[100, 90], [100, 90]]) == 1
    assert (
        bucket_search.choose_plan([[100, 50], [100, 101]]) == 0
    )  # the second rank says how long a step takes
    assert bucket_search.choose_plan([[1000, 980]]) == 0
    assert bucket_search.choose_plan([[1000, 900, 800]]) == 2
    assert bucket_search.choose_plan([[0, 0]]) == 0


def test_arrivals_are_medians() -> None:
    seen = bucket_search.arrivals([[1.0, 5.0], [9.0, 6.0], [2.0, 7.0]], [10.0, 30.0, 20.0])
    assert seen == bucket_search.GradientTimes((2.0, 6.0), 20.0)


# --- what a trace says -------------------------------------------------------------------------------


def step(*buckets: BucketTimes) -> StepTimes:
    return StepTimes(7, 0, 10_000_000, 30_000_000, 40_000_000, buckets)


def bucket(number: int, launched: int, done: int, wait: TimeSpan) -> BucketTimes:
    copies = (TimeSpan(launched - 2, launched - 1),)
    return BucketTimes(number, 400, copies, launched, done, wait)


def test_communication_counts_once_where_buckets_overlap() -> None:
    seen = step(
        bucket(0, 100, 200, TimeSpan(0, 0)),
        bucket(1, 150, 300, TimeSpan(0, 0)),
        bucket(2, 400, 500, TimeSpan(0, 0)),
    )
    assert seen.communication == 300
    assert timeline.covered([]) == 0


def test_the_summary_says_how_much_is_hidden() -> None:
    first = bucket(0, 12_000_000, 20_000_000, TimeSpan(30_000_000, 30_000_000))
    last = bucket(1, 30_000_000, 32_000_000, TimeSpan(30_000_000, 32_000_000))
    said = timeline.summary([step(first, last)])
    assert "1 step: forward 10.0 ms, backward 20.0 ms" in said
    assert "communication 10.0 ms in 2 buckets (2.0 ms exposed, 80% hidden)" in said
    assert "no step" in timeline.summary([])
    assert timeline.hidden_share([]) == 1


def test_chrome_events_have_microseconds_ranks_and_lanes() -> None:
    events = timeline.chrome_events([step(bucket(0, 12_000, 20_000, TimeSpan(30_000, 32_000)))], rank=3)
    by_name = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(by_name) == {
        "forward",
        "backward",
        "copy",
        "waits for earlier buckets",
        "transfer",
        "exposed: bucket 0",
    }
    assert all(event["pid"] == 3 for event in events)
    assert (by_name["transfer"]["ts"], by_name["transfer"]["dur"]) == (12.0, 8.0)
    assert by_name["transfer"]["args"] == {"step": 7, "bucket": 0, "bytes": 400}
