"""Seeds that are computed, not drawn: equal runs get equal seeds, in a process that starts later too.

`splitmix` is a permutation of the 64-bit numbers that separates neighbours (splitmix64 by Steele, Lea and Flood).
"""

from __future__ import annotations

_ALL = 2**64 - 1


def splitmix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & _ALL
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _ALL
    return number ^ number >> 31


def mixed(*numbers: int) -> int:
    """A number of 64 bits that depends on each of these and on their order."""
    found = len(numbers)
    for number in numbers:
        found = splitmix(found ^ splitmix(number & _ALL))
    return found


def of_new_rank(seed: int, commit: int, rank: int) -> int:
    """The seed of a rank without saved generators.

    `seed`: that of the lowest rank that has saved its generators in this commit.
    """
    return mixed(seed, commit, rank)


def of_step(seed: int, step: int, logical_rank: int, logical_world: int, stream: int) -> int:
    """The seed of a logical rank in a step; `stream` is 0 or 1.

    torch's generator on the CPU uses only the low 32 bits of a seed. Here they are a permutation of a counter, so the
    first 2^32 seeds of a job differ in them. Random numbers of 32 bits would meet after some 80,000 seeds.
    """
    counter = (step * logical_world + logical_rank) * 2 + stream
    low = _permuted((mixed(seed) + counter) & 0xFFFFFFFF)
    return mixed(seed, step, logical_rank, stream) & ~0xFFFFFFFF | low


def _permuted(number: int) -> int:
    """The last steps of the hash function Murmur3, for 32 bits."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
