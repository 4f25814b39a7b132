"""A Reed-Solomon code over the field of 256 elements: k data chunks and m parity chunks, of which any k give all.

Parity chunk r is the sum of c[r][j] * d[j] over the data chunks j. The chunks that are left are then linear equations
for the data. They have one solution if every square submatrix of c is invertible. A Cauchy matrix has this property:

    c[r][j] = 1 / (x[r] + y[j])       all x and y different

Multiplying rows and columns by constants other than 0 keeps the property. So row 0 and column 0 are made 1: the code
with m = 1 is a plain exclusive or, and the code with k = 1 consists of copies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = tuple[int, ...]
_REDUCED = 0x11D  # x^8 + x^4 + x^3 + x^2 + 1; x generates all elements other than 0
MOST = 256  # chunks in a stripe: there are no more elements


@functools.cache
def _powers() -> tuple[Row, Row]:
    """The powers of x, and the exponent of each element."""
    powers, exponents, element = [], [0] * 256, 1
    for exponent in range(255):
        powers.append(element)
        exponents[element] = exponent
        element <<= 1
        if element & 0x100:
            element ^= _REDUCED
    return tuple(powers), tuple(exponents)


def product(a: int, b: int) -> int:
    powers, exponents = _powers()
    return powers[(exponents[a] + exponents[b]) % 255] if a and b else 0


def inverse(a: int) -> int:
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    powers, exponents = _powers()
    return powers[-exponents[a] % 255]


@functools.cache
def parity_rows(k: int, m: int) -> tuple[Row, ...]:
    """The coefficients of each parity chunk."""
    if k < 1 or m < 0 or k + m > MOST:
        raise WrongValue(f"invalid code {k}+{m}: use at least 1 data chunk, and at most {MOST} chunks in all")
    cauchy = [[inverse((k + r) ^ j) for j in range(k)] for r in range(m)]
    found = []
    for row in cauchy:
        # The columns are divided by row 0, then each row by its first element.
        even = [product(c, inverse(first)) for c, first in zip(row, cauchy[0], strict=True)]
        found.append(tuple(product(c, inverse(even[0])) for c in even))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Solution:
    """How lost data chunks follow from others: each row has a coefficient for each source."""

    sources: tuple[int, ...]  # numbers of chunks: 0 to k - 1 are data, the rest is parity
    rows: tuple[Row, ...]  # one for each lost chunk


def solve(k: int, m: int, there: Sequence[int], lost: Sequence[int]) -> Solution | None:
    """Return how the lost data chunks are computed from k of the chunks that are there; None if these are too few."""
    usable = [chunk for chunk in sorted(set(there)) if chunk not in lost]
    if len(usable) < k:
        return None
    sources = tuple(usable[:k])  # data chunks come first: they need no arithmetic
    equations = [_row_of(k, m, chunk) for chunk in sources]
    inverted = _inverted(equations)
    return Solution(sources, tuple(inverted[chunk] for chunk in lost))


def _row_of(k: int, m: int, chunk: int) -> Row:
    """A chunk as a combination of the data."""
    return tuple(int(j == chunk) for j in range(k)) if chunk < k else parity_rows(k, m)[chunk - k]


def _inverted(matrix: Sequence[Row]) -> list[Row]:
    """The inverse of a matrix, by Gauss-Jordan elimination. Every matrix of a code that is asked for has one."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [product(factor, each) for each in rows[column]]
        for i in range(size):
            if i != column and (times := rows[i][column]):
                pairs = zip(rows[i], rows[column], strict=True)
                rows[i] = [each ^ product(times, other) for each, other in pairs]
    return [tuple(row[size:]) for row in rows]
