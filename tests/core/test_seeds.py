"""Computed seeds: the same for equal runs, different for all ranks and commits."""

from __future__ import annotations

from ddp.elastic import seeds


def test_the_published_numbers_of_splitmix64() -> None:
    """The first outputs of the generator from state 1234567, which its authors' code prints."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [seeds.splitmix(1234567 + step * gamma) for step in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_new_ranks_get_seeds_of_their_own() -> None:
    found = {
        seeds.of_new_rank(seed, commit, rank)
        for seed in (0, 1, 2**64 - 1, -1)
        for commit in range(20)
        for rank in range(20)
    }
    assert len(found) == 3 * 20 * 20, "-1 and 2**64 - 1 are the same number for torch as well"
    assert all(0 <= each < 2**64 for each in found)
    assert seeds.of_new_rank(5, 7, 1) != seeds.of_new_rank(5, 1, 7)


def test_no_two_logical_ranks_and_steps_share_the_bits_that_torch_uses() -> None:
    found = [
        seeds.of_step(5, step, rank, 8, stream)
        for step in range(5_000)
        for rank in range(8)
        for stream in range(2)
    ]
    assert len({each & 0xFFFFFFFF for each in found}) == len(found) == 80_000
    assert max(found) < 2**64
    assert seeds.of_step(5, 3, 2, 8, 0) == seeds.of_step(5, 3, 2, 8, 0) != seeds.of_step(6, 3, 2, 8, 0)
