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
    yield from _played(request, "plays", in_place=False)


@pytest.fixture(scope="session")
def plays_in_place(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Played]]]:
    yield from _played(request, "plays_in_place", in_place=True)


def _played(
    request: pytest.FixtureRequest, fixture: str, *, in_place: bool
) -> Iterator[dict[str, Future[Played]]]:
    """The cases of all tests that were chosen, several at once: most of a case is waiting."""
    chosen = [item for item in request.session.items if fixture in getattr(item, "fixturenames", ())]
    specs = (getattr(item, "callspec", None) for item in chosen)
    found = (spec.params.get("case") for spec in specs if spec is not None)
    cases = [case for case in found if isinstance(case, Case)]  # other suites have cases of their own
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        yield {
            case.name: pool.submit(play, case, LENIENT, preloads=True, in_place=in_place) for case in cases
        }
        pool.shutdown(cancel_futures=True)
