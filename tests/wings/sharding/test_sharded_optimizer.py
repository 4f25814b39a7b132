"""A sharded optimizer does what the whole one does, with a share of its state on each rank."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import sharding_trials as trials
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_launch_wings.sharding.shards import shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from crew import Crew

    CrewOf = Callable[..., Crew]

KINDS = list(trials.OPTIMIZERS)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_same_bits(crew_of: CrewOf, kind: str) -> None:
    assert crew_of("gloo", 2).run(trials.like_the_whole_one, kind) == [(0.0, 0.0, True)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(crew_of: CrewOf, kind: str) -> None:
    """torch rounds the last elements of a tensor, past its vectors, in other places; a piece has others there."""
    for difference, _, same in crew_of("gloo", 2).run(trials.like_the_whole_one, kind, torch.bfloat16):
        assert same
        assert difference < 1e-5


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("shm", 4), ("hier", 2)])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_like_the_whole_optimizer(crew_of: CrewOf, kind: str, backend: str, size: int) -> None:
    for difference, _, same in crew_of(backend, size).run(trials.like_the_whole_one, kind):
        assert same
        assert difference < 1e-5


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("shm", 4), ("hier", 2)])
def test_large_gradients_in_half_precision_stay_finite(crew_of: CrewOf, backend: str, size: int) -> None:
    """Their sum over the ranks is beyond float16, their average is not."""
    for ours, whole in crew_of(backend, size).run(trials.large_half_precision_gradients):
        assert ours == pytest.approx([60_000] * len(ours), rel=1e-3)
        assert ours == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate": True},
        {"as_views": True},
        {"accumulate": True, "as_views": True},
        {"clipped": 2.0},
        {"clipped": float("inf"), "accumulate": True},
    ],
    ids=str,
)
def test_with_accumulation_views_and_clipping(crew_of: CrewOf, given: dict[str, Any]) -> None:
    arguments = [given.get(name, default) for name, default in _DEFAULTS.items()]
    for difference, norms_apart, same in crew_of("gloo", 2).run(
        trials.like_the_whole_one, "adamw", torch.float32, *arguments
    ):
        assert same
        # Averages are added up here; there, the average of a sum is taken.
        assert difference < 1e-6
        assert norms_apart < 1e-5


_DEFAULTS = {"accumulate": False, "clipped": None, "as_views": False}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_that_of_the_whole_optimizer(crew_of: CrewOf, kind: str) -> None:
    assert crew_of("gloo", 2).run(trials.there_and_back, kind) == [(0.0, True)] * 2


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_state_moves_to_a_world_of_another_size(crew_of: CrewOf, kind: str) -> None:
    saved = crew_of("gloo", 2).run(trials.saved_here, kind)[0]
    assert max(crew_of("gloo", 3).run(trials.loaded_here, kind, saved)) < 1e-6


@pytest.mark.parametrize(("kind", "states"), [("sgd", 1), ("adamw", 2), ("adam", 3)])
def test_each_rank_holds_its_share_of_the_state(crew_of: CrewOf, kind: str, states: int) -> None:
    for held, total in crew_of("gloo", 3).run(trials.memory, kind):
        assert held <= states * (total / 3 + 3)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("shm", 4)])
def test_gradients_are_not_copied(crew_of: CrewOf, backend: str, size: int) -> None:
    for answers in crew_of(backend, size).run(trials.without_a_copy):
        assert len(answers) > 1
        assert all(answers)


def test_gradients_travel_during_the_backward(crew_of: CrewOf) -> None:
    for _first, *later in crew_of("gloo", 2).run(trials.overlap):
        for under_way in later:
            assert under_way[:-1] == [True] * (len(under_way) - 1)
            assert len(under_way) > 1


@pytest.mark.parametrize("overflow", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(crew_of: CrewOf, overflow: bool) -> None:
    assert crew_of("gloo", 2).run(trials.scaled, overflow) == [(overflow, True, True, True)] * 2


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("again", [False, True])
def test_an_optimizer_may_keep_gradients(crew_of: CrewOf, backend: str, again: bool) -> None:
    assert max(crew_of(backend, 2).run(trials.kept_gradients, again)) < 1e-6


def test_an_order_that_was_observed_is_kept(crew_of: CrewOf) -> None:
    for names in crew_of("gloo", 2).run(trials.an_observed_order):
        assert names.index("b.weight") < names.index("a.weight")


def test_uneven_inputs(crew_of: CrewOf) -> None:
    for same, difference in crew_of("gloo", 2).run(trials.uneven_inputs):
        assert same
        assert difference < 1e-6


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("shm", 4)])
def test_torchs_own_sharding(crew_of: CrewOf, backend: str, size: int) -> None:
    assert max(crew_of(backend, size).run(trials.torchs_zero)) < 1e-6


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("plain module", "WrongType", "ddp.DistributedDataParallel"),
        ("left out", "WrongValue", "'scale' of the model is not in this optimizer"),
        ("not elementwise", "WrongValue", "elementwise=True"),
        ("sparse", "WrongValue", "the gradient of 'weight'"),
        ("twice", "WrongUse", "can only be called once"),
        ("state of all", "WrongUse", "consolidate_state_dict"),
        ("one more group", "WrongUse", "add_param_group()"),
        ("no_sync only", "WrongUse", "no_sync()"),
        ("moved", "WrongUse", "'first.weight' was replaced"),
        ("other groups", "WrongValue", "parameter groups"),
    ],
)
def test_misuse_is_named(crew_of: CrewOf, how: str, kind: str, says: str) -> None:
    crew = crew_of("gloo", 2)
    crew.tell(trials.misuse, how)
    for answer in crew.answers():
        assert (answer.kind, says in answer.text) == (kind, True), answer


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 9))
def test_shards_cover_every_element_once(sizes: list[int], world_size: int) -> None:
    shards = [shard(sizes, world_size, rank) for rank in range(world_size)]
    assert len({each.size for each in shards}) == 1
    covered = [
        (piece.member, i) for each in shards for piece in each.pieces for i in range(piece.start, piece.end)
    ]
    assert covered == [(member, i) for member, size in enumerate(sizes) for i in range(size)]
    starts = list(itertools.accumulate(sizes, initial=0))
    for rank, each in enumerate(shards):
        assert each.begin == rank * each.size
        for piece in each.pieces:
            assert starts[piece.member] + piece.start == each.begin + piece.offset
            assert piece.offset + piece.end - piece.start <= each.size
