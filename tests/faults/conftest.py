from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from fault_play import JOBS_AT_ONCE, Played, play

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def plays(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Played]]]:
    """The cases of all tests that were chosen, several at once: most of a case is waiting."""
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    cases = [spec.params["case"] for spec in specs if spec is not None and "case" in spec.params]
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        yield {case.name: pool.submit(play, case) for case in cases}
        pool.shutdown(cancel_futures=True)
