from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from fault_case import Case
from fault_play import JOBS_AT_ONCE, LENIENT, Played, play

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def plays(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Played]]]:
    """The cases of all tests that were chosen, several at once: most of a case is waiting."""
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    found = (spec.params.get("case") for spec in specs if spec is not None)
    cases = [case for case in found if isinstance(case, Case)]  # other suites have cases of their own
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        yield {case.name: pool.submit(play, case, LENIENT, preloads=True) for case in cases}
        pool.shutdown(cancel_futures=True)
