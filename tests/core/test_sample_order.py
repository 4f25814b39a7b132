"""An epoch is seen once, whatever worlds see it: in order, without a gap, with at most one uneven round."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.elastic import sampler
from ddp.elastic.commits import Thinning
from ddp.elastic.keeper import DeviceSpan, Stored, spans
from ddp.elastic.sampler import Progress, advance, next_epoch, positions, rounds_left

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


# --- computed seeds: the same for equal runs, different for all ranks and commits ---------------------


def test_the_published_numbers_of_splitmix64() -> None:
    """The first outputs of the generator from state 1234567, which its authors' code prints."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [sampler.splitmix(1234567 + step * gamma) for step in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_new_ranks_get_seeds_of_their_own() -> None:
    found = {
        sampler.seed_of_new_rank(seed, commit, rank)
        for seed in (0, 1, 2**64 - 1, -1)
        for commit in range(20)
        for rank in range(20)
    }
    assert len(found) == 3 * 20 * 20, "-1 and 2**64 - 1 are the same number for torch as well"
    assert all(0 <= each < 2**64 for each in found)
    assert sampler.seed_of_new_rank(5, 7, 1) != sampler.seed_of_new_rank(5, 1, 7)


# --- Which commits are written to a slow store: all ranks must write some of the same, without talking about it


N_DUE = 512


def written(takes_intervals: float, changes_at: int = 0, then: float = 0.0) -> set[int]:
    """The commits that a rank writes, which needs so many intervals between due commits for one of them."""
    thinning, busy_until, found = Thinning(), 0.0, set()
    for index in range(N_DUE):
        takes, thinning = thinning.ask(index, busy_until > index)
        if takes:
            found.add(index)
            busy_until = index + (then if changes_at and index >= changes_at else takes_intervals)
    return found


def test_a_store_that_is_fast_enough_gets_every_commit() -> None:
    assert written(0.9) == set(range(N_DUE))


def test_a_slow_store_gets_what_it_can_take() -> None:
    found = written(3.5)
    assert N_DUE / 10 < len(found) < N_DUE / 3.5


def test_a_store_that_becomes_fast_again_soon_gets_every_commit() -> None:
    found = written(20.0, changes_at=200, then=0.5)
    assert set(range(400, N_DUE)) <= found


@given(st.lists(st.floats(0.1, 12.0), min_size=2, max_size=6))
def test_ranks_of_any_speeds_complete_commits(speeds: list[float]) -> None:
    complete = set.intersection(*map(written, speeds))
    gaps = [
        later - earlier
        for earlier, later in zip([0, *sorted(complete)], [*sorted(complete), N_DUE], strict=True)
    ]
    assert max(gaps) <= 8 * max(1.0, *speeds), (sorted(complete)[:20], max(gaps))


# --- which bytes of a commit each device sends --------------------------------------------------------


def test_small_tensors_of_the_host_lie_inside_of_a_span() -> None:
    tensors = [Stored(0, 60, "emu:0"), Stored(64, 4, ""), Stored(128, 0, "emu:1"), Stored(128, 10, "emu:0")]
    assert spans(tensors) == (DeviceSpan("emu:0", 0, 138),)


def test_large_tensors_of_the_host_and_other_devices_divide_spans() -> None:
    large = 1 << 20
    tensors = [Stored(0, 60, "emu:0"), Stored(64, large, ""), Stored(64 + large, 64, "emu:0")]
    assert spans(tensors) == (DeviceSpan("emu:0", 0, 60), DeviceSpan("emu:0", 64 + large, 128 + large))
    tensors = [Stored(0, 60, "emu:0"), Stored(64, 64, "emu:1"), Stored(128, 64, "emu:0")]
    assert [each.device for each in spans(tensors)] == ["emu:0", "emu:1", "emu:0"]
    assert spans([Stored(0, large, "")]) == ()


@given(st.lists(st.tuples(st.sampled_from(["", "emu:0", "emu:1"]), st.integers(0, 200_000)), max_size=12))
def test_each_tensor_of_a_device_is_in_one_span_of_its_device(described: list[tuple[str, int]]) -> None:
    tensors, end = [], 0
    for device, n_bytes in described:
        tensors.append(Stored(end, n_bytes, device))
        end += -(-n_bytes // 64) * 64
    found = spans(tensors)
    for each in tensors:
        holders = [span for span in found if span.has(each)]
        if each.device and each.n_bytes:
            assert len(holders) == 1
            assert each.begin + each.n_bytes <= holders[0].end
        elif not each.device:
            assert not holders
    assert all(one.end <= other.begin for one, other in itertools.pairwise(found))
