"""Ranks exchange values of any length."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddp.elastic.team import Team


class Table:
    """Where all ranks lay their bytes down."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.rows = [b""] * size
        self.n_collectives = 0


class Rank(Team):
    """A rank in a thread."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.size, self._table = rank, len(table.rows), table

    def _all_gather(self, data: bytes, n_bytes: int) -> list[bytes]:
        assert len(data) <= n_bytes
        table = self._table
        table.rows[self.rank] = data.ljust(n_bytes, b"\0")
        if table.barrier.wait(60) == 0:
            table.n_collectives += 1
        found = list(table.rows)
        table.barrier.wait(60)
        return found


@pytest.mark.parametrize(
    ("lengths", "n_collectives"),
    [((0, 1, 2), 1), ((900, 0, 900), 1), ((5000, 3, 0), 2), ((2, 1100, 100_000), 2), ((1024, 1023, 1025), 2)],
)
def test_every_rank_gets_all_values(lengths: tuple[int, ...], n_collectives: int) -> None:
    values: list[Any] = [{"rank": rank, "text": "x" * length} for rank, length in enumerate(lengths)]
    table = Table(len(values))
    with ThreadPoolExecutor(len(values)) as threads:
        found = list(threads.map(lambda rank: Rank(table, rank).gather(values[rank]), range(len(values))))
    assert found == [values] * len(values)
    assert table.n_collectives == n_collectives
