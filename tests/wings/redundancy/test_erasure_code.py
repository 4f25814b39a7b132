"""The erasure code of commits in memory: any k of k + m chunks give the data."""

from __future__ import annotations

import itertools
import random

import pytest

from ddp_launch_wings.redundancy import placement
from ddp_launch_wings.redundancy.placement import inverse, parity_rows, product, solve


def by_definition(a: int, b: int) -> int:
    """Multiply polynomials over GF(2), then divide by x^8 + x^4 + x^3 + x^2 + 1."""
    whole = 0
    for bit in range(8):
        if b >> bit & 1:
            whole ^= a << bit
    for bit in reversed(range(8, 15)):
        if whole >> bit & 1:
            whole ^= 0x11D << (bit - 8)
    return whole


def test_products_and_inverses_of_all_elements() -> None:
    for a, b in itertools.product(range(256), repeat=2):
        assert product(a, b) == by_definition(a, b)
    assert all(product(a, inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def combined(row: tuple[int, ...], values: list[int]) -> int:
    total = 0
    for coefficient, value in zip(row, values, strict=True):
        total ^= product(coefficient, value)
    return total


@pytest.mark.parametrize(
    ("k", "m"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (5, 4), (6, 2), (8, 3), (12, 2)]
)
def test_every_set_of_lost_chunks_is_solved(k: int, m: int) -> None:
    numbers = random.Random(k * 16 + m)
    data = [numbers.randrange(256) for _ in range(k)]
    chunks = data + [combined(row, data) for row in parity_rows(k, m)]
    for n_lost in range(m + 1):
        for gone in itertools.combinations(range(k + m), n_lost):
            there = [chunk for chunk in range(k + m) if chunk not in gone]
            lost = [chunk for chunk in gone if chunk < k]
            solution = solve(k, m, there, lost)
            assert solution is not None
            values = [chunks[source] for source in solution.sources]
            assert [combined(row, values) for row in solution.rows] == [data[chunk] for chunk in lost], gone
    for gone in itertools.combinations(range(k + m), m + 1):
        assert solve(k, m, [chunk for chunk in range(k + m) if chunk not in gone], [0]) is None


def test_a_lost_chunk_is_never_its_own_source() -> None:
    assert solve(2, 1, [0, 1, 2], [0]) == placement.Solution((1, 2), ((1, 1),))


def test_one_parity_chunk_is_an_exclusive_or_and_one_data_chunk_is_copied() -> None:
    for n in range(1, 40):
        assert parity_rows(n, 1) == ((1,) * n,)
        assert parity_rows(1, n) == ((1,),) * n


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, -1), (200, 57)])
def test_codes_that_do_not_exist(k: int, m: int) -> None:
    with pytest.raises(ValueError, match="invalid code"):
        parity_rows(k, m)
