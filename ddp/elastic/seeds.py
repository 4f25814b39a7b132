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
