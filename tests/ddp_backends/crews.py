"""A fixture for other folders: crews over any backend, made when they are asked for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
from crew import Crew

from ddp.groups import core_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def crew_of() -> Iterator[Callable[[str, int], Crew]]:
    """Ranks over a backend, the same for all tests. `hier` is given hosts of one rank each."""
    made: list[Crew] = []

    @cache
    def of(backend: str, size: int = 2) -> Crew:
        if backend != "gloo" and core_loading.native() is None:
            pytest.skip("the compiled core is not built here (no compiler)")
        hosts = [{"DDP_HOST_KEY": f"host{rank}"} for rank in range(size)] if backend == "hier" else ()
        crew = Crew(size, backend, hosts)
        assert not crew.problems
        made.append(crew)
        return crew

    yield of
    for crew in made:
        crew.close()
