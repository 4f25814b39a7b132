from __future__ import annotations

from typing import TYPE_CHECKING

import pool
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_session() -> Iterator[None]:
    yield
    pool.close_all()
