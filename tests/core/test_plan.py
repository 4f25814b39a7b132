from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.reducer.plan import (
    MIB,
    Bucket,
    BucketPlan,
    Kind,
    Limits,
    ParameterInfo,
    Transport,
    disagreement,
    first_plan,
    first_unlike,
    limits,
    model_fingerprint,
    plan_fingerprint,
    rebuilt_plan,
)

FLAT_ONLY = Transport(in_place=False)
COSTS = Transport().costs


def parameter(
    numel: int = 1, dtype: str = "float32", device: str = "cpu", sparse: bool = False, name: str = "w"
) -> ParameterInfo:
    return ParameterInfo(name, (numel,), (1,), dtype, device, 8 if dtype == "float64" else 4, sparse)


facts = st.builds(
    parameter,
    numel=st.integers(0, 2 * COSTS.min_in_place // 4),
    dtype=st.sampled_from(["float32", "float64"]),
    device=st.sampled_from(["cpu", "meta"]),
    sparse=st.booleans(),
)
sizes = st.lists(st.integers(0, 4 * MIB), min_size=1, max_size=3).map(tuple)
models = st.lists(facts, min_size=1, max_size=30)
bounds = st.builds(Limits, first=sizes, rebuilt=sizes)
transports = st.builds(Transport, lists=st.booleans(), in_place=st.booleans())


def check(plan: BucketPlan, model: list[ParameterInfo]) -> None:
    members = [member for bucket in plan.buckets for member in bucket.members]
    assert sorted(members) == list(range(len(model)))
    for bucket in plan.buckets:
        assert len({(model[i].dtype, model[i].device) for i in bucket.members}) == 1
        if bucket.kind is Kind.SPARSE:
            assert len(bucket.members) == 1
        assert all(model[i].sparse == (bucket.kind is Kind.SPARSE) for i in bucket.members)


@given(models, bounds, transports)
def test_every_parameter_is_in_one_bucket_of_its_own_dtype_and_device(
    model: list[ParameterInfo], limit: Limits, transport: Transport
) -> None:
    check(first_plan(model, limit, transport), model)


@given(models, bounds, transports, st.randoms(use_true_random=False))
def test_a_rebuilt_plan_is_complete_in_the_order_in_which_its_buckets_fill(
    model: list[ParameterInfo], limit: Limits, transport: Transport, chance: object
) -> None:
    order = list(range(len(model)))
    chance.shuffle(order)  # type: ignore[attr-defined]
    plan = rebuilt_plan(model, order, limit, transport)
    check(plan, model)
    filled = [max(order.index(i) for i in bucket.members) for bucket in plan.buckets]
    assert filled == sorted(filled)
    for bucket in plan.buckets:
        places = [order.index(i) for i in bucket.members]
        assert places == sorted(places)


@given(models, bounds, st.randoms(use_true_random=False))
def test_no_bucket_goes_on_growing_once_it_has_reached_its_limit(
    model: list[ParameterInfo], limit: Limits, chance: object
) -> None:
    order = list(range(len(model)))
    chance.shuffle(order)  # type: ignore[attr-defined]
    for bucket in rebuilt_plan(model, order, limit, FLAT_ONLY).buckets:
        if len(bucket.members) > 1:
            assert sum(model[i].nbytes for i in bucket.members[:-1]) < max(limit.rebuilt)


def test_the_first_plan_is_the_reverse_of_the_registration_the_rebuilt_one_the_order_of_arrival() -> None:
    model = [parameter(10) for _ in range(4)]
    limit = Limits(first=(80,), rebuilt=(40, 80))
    assert [b.members for b in first_plan(model, limit, FLAT_ONLY).buckets] == [(2, 3), (0, 1)]
    rebuilt = rebuilt_plan(model, [3, 1, 2, 0], limit, FLAT_ONLY)
    assert [b.members for b in rebuilt.buckets] == [(3,), (1, 2), (0,)]


def test_limits_count_for_each_dtype_by_itself() -> None:
    model = [parameter(10, dtype) for dtype in ("float32", "float64", "float32", "float64", "float32")]
    limit = Limits(first=(80,), rebuilt=(40, 120))
    rebuilt = rebuilt_plan(model, [0, 1, 2, 3, 4], limit, FLAT_ONLY)
    assert [b.members for b in rebuilt.buckets] == [(0,), (1,), (3,), (2, 4)]


def test_a_parameter_as_large_as_a_bucket_is_averaged_where_it_lies() -> None:
    model = [parameter(10), parameter(MIB), parameter(10)]
    limit = Limits(first=(MIB,), rebuilt=(MIB,))
    plan = rebuilt_plan(model, [0, 1, 2], limit, Transport())
    assert plan.buckets == (Bucket((1,), Kind.IN_PLACE), Bucket((0, 2), Kind.FLAT))
    hooked = rebuilt_plan(model, [0, 1, 2], limit, FLAT_ONLY)
    assert {bucket.kind for bucket in hooked.buckets} == {Kind.FLAT}


def test_a_large_parameter_travels_by_itself_unless_the_group_reads_buckets_where_they_lie() -> None:
    model = [parameter(10), parameter(COSTS.always_in_place // 4), parameter(10)]
    limit = limits(25 * MIB, MIB, [], whole_at_first=True)
    assert Bucket((1,), Kind.IN_PLACE) in rebuilt_plan(model, [0, 1, 2], limit, Transport()).buckets
    reading = rebuilt_plan(model, [0, 1, 2], limit, Transport(lists=True))
    assert {bucket.kind for bucket in reading.buckets} == {Kind.FLAT}


def test_a_small_model_needs_no_bucket_where_the_group_takes_lists() -> None:
    plan = first_plan(
        [parameter(3), parameter(4)], limits(MIB, MIB, [], whole_at_first=True), Transport(lists=True)
    )
    assert plan.buckets == (Bucket((0, 1), Kind.IN_PLACE),)
    larger = [parameter(MIB), parameter(MIB)]
    plan = first_plan(larger, limits(9 * MIB, MIB, [], whole_at_first=True), Transport(lists=True))
    assert plan.buckets == (Bucket((0, 1), Kind.FLAT),)


def test_limits_as_torch_has_them() -> None:
    assert limits(25, 1, [], whole_at_first=False) == Limits((1, 25), (1, 25))
    assert limits(25, 25, [], whole_at_first=False).first == (25,)
    assert limits(25, 1, [], whole_at_first=True).first[0] > 2**60
    assert limits(25, 1, [3, 4], whole_at_first=True) == Limits((3, 4), (3, 4))


def test_an_order_that_does_not_name_everybody_once_is_refused() -> None:
    with pytest.raises(ValueError, match="every parameter once"):
        rebuilt_plan([parameter(), parameter()], [0, 0], Limits((1,), (1,)), Transport())


@given(models, bounds)
def test_fingerprints_tell_plans_and_models_apart(model: list[ParameterInfo], limit: Limits) -> None:
    plan = first_plan(model, limit, FLAT_ONLY)
    assert plan_fingerprint(plan) == plan_fingerprint(first_plan(list(model), limit, FLAT_ONLY))
    assert plan_fingerprint(plan) != plan_fingerprint(BucketPlan((*plan.buckets, plan.buckets[0])))
    assert model_fingerprint(model, []) != model_fingerprint([*model, parameter()], [])
    assert model_fingerprint(model, [("a", 1)]) != model_fingerprint(model, [("a", 2)])


def test_the_number_of_a_device_and_a_name_may_differ_between_ranks() -> None:
    here, there = parameter(device="cuda:0", name="a"), parameter(device="cuda:1", name="b")
    assert disagreement([[here], [there]], [[], []]) == ""
    there = parameter(device="cuda:1", name="a")
    assert model_fingerprint([here], []) == model_fingerprint([there], [])
    assert "device cpu" in disagreement([[here], [parameter(device="cpu", name="a")]], [[], []])


def test_the_same_names_in_another_order_are_a_disagreement() -> None:
    one, two, three = (parameter(4, name=name) for name in ("one", "two", "three"))
    assert model_fingerprint([one, two], []) != model_fingerprint([two, one], [])
    text = disagreement([[one, two, three], [one, three, two]], [[], []])
    assert all(word in text for word in ("params[1]", "'two' on rank 0", "'three' on rank 1"))
    assert disagreement([[one, two], [one, three]], [[], []]) == ""


def test_state_that_has_no_place_elsewhere_is_named() -> None:
    ours = [("a", (2, 3), "float32"), ("b", (), "int64")]
    renamed = [("c", (2, 3), "float32"), ("b", (), "int64")]
    assert first_unlike([ours, renamed]) == ""
    other = [("a", (2, 3), "float32"), ("b", (1,), "int64")]
    text = first_unlike([ours, ours, other])
    assert "rank 0 has 'b' (int64 ())" in text
    assert "rank 2 has 'b' (int64 (1,))" in text
    assert "'b' exists only on rank 0" in first_unlike([ours, ours[:1]])
    assert "'x' exists only on rank 1" in first_unlike([ours, [*ours, ("x", (1,), "int8")]])


def test_a_disagreement_names_the_first_parameter_and_rank_that_differ() -> None:
    ours = [parameter(4, name="one"), parameter(5, name="two")]
    theirs = [parameter(4, name="one"), parameter(6, name="two")]
    text = disagreement([ours, ours, theirs], [[], [], []])
    assert "'two' (params[1]) of rank 2 with sizes [6]" in text
    assert "sizes [5]" in text
    other = [parameter(4, "float64", name="one"), parameter(5, name="two")]
    assert "dtype float64" in disagreement([ours, other], [[], []])
    assert "rank 1 has inconsistent 1 params" in disagreement([ours, ours[:1]], [[], []])
    assert (
        disagreement([ours, ours], [[("x", 1)], [("x", 2)]])
        == "DDP verifies model across all ranks: x=1 on rank 0, but x=2 on rank 1. Use the same value on all ranks."
    )
    sparse = [parameter(4, name="one", sparse=True), ours[1]]
    assert "sparse" in disagreement([ours, sparse], [[], []])
