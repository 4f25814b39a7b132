from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from paging import Site, job_at, site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launched import Launched


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service whose users have tokens."""
    with site(tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.fixture(scope="module")
def job(shared: Site) -> Iterator[Launched]:
    with job_at(shared, "watched", "--max-restarts", "5") as found:
        yield found
