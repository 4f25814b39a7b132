"""An epoch is seen once, whatever worlds see it: in order, without a gap, with at most one uneven round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.elastic.sample_order import Progress, advance, next_epoch, positions, rounds_left

worlds = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 9)), max_size=6)


def seen_by(progress: Progress, world_size: int, samples: int, drop_last: bool) -> list[int]:
    """What a world of that size trains on in so many samples per rank."""
    shares = [positions(progress, rank, world_size, drop_last)[:samples] for rank in range(world_size)]
    return [place for share in shares for place in share]


@given(st.integers(1, 60), worlds, st.integers(1, 7), st.booleans())
def test_worlds_of_changing_size_see_each_sample_once(
    size: int, before: list[tuple[int, int]], last: int, drop_last: bool
) -> None:
    progress, seen = Progress(size), []
    for world_size, samples in before:
        # Each of these worlds ends in the middle of the epoch: what it would have padded does not count.
        samples = min(samples, (size - progress.consumed) // world_size)
        seen += seen_by(progress, world_size, samples, drop_last)
        progress = advance(progress, samples, world_size)
        assert sorted(seen) == list(range(progress.consumed))
    rounds = rounds_left(progress, last, drop_last)
    seen += seen_by(progress, last, rounds, drop_last)
    twice = len(seen) - len(set(seen))
    missing = size - len(set(seen))
    assert twice < last
    assert missing < last
    assert (twice == 0) if drop_last else (missing == 0)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 7), st.booleans())
def test_ranks_take_the_same_number_of_samples(size: int, consumed: int, world: int, drop_last: bool) -> None:
    progress = Progress(size, 0, min(consumed, size))
    lengths = {len(positions(progress, rank, world, drop_last)) for rank in range(world)}
    assert lengths == {rounds_left(progress, world, drop_last)}


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_the_same_global_batches_in_worlds_of_any_size(size: int, world: int, batch: int) -> None:
    """As sets: what W ranks with batches of B take in a step, one rank takes with a batch of W * B."""
    many = [positions(Progress(size), rank, world, drop_last=True) for rank in range(world)]
    alone = positions(Progress(size), 0, 1, drop_last=True)
    for step in range(size // (world * batch)):
        together = [place for share in many for place in share[step * batch : (step + 1) * batch]]
        assert sorted(together) == alone[step * world * batch : (step + 1) * world * batch]


def test_the_next_epoch_begins_at_its_beginning() -> None:
    progress = advance(Progress(10, 3), 4, 2)
    assert progress == Progress(10, 3, 8)
    assert next_epoch(progress) == Progress(10, 4, 0)
    assert advance(progress, 4, 2).consumed == 10


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 5, "consumed": 6}, {"size": 5, "epoch": -1}])
def test_no_such_position(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="position"):
        Progress(**wrong)
    with pytest.raises(ValueError, match="samples=-1"):
        advance(Progress(5), -1, 1)
