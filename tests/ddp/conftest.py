from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
