from __future__ import annotations

import pytest
from crew import Crew

from ddp.groups import core_loading


def pytest_collection_modifyitems(items):
    if core_loading.native() is None:
        for item in items:
            if "ddp_backends" in str(item.path) and "without_the_core" not in item.name:
                item.add_marker(pytest.mark.skip(reason="the compiled core is not built here (no compiler)"))


@pytest.fixture(scope="session", params=[2, 3, 4])
def crew(request):
    """Ranks on one host, over shm, for all tests that leave them as they were."""
    with Crew(request.param) as ranks:
        assert not ranks.problems
        yield ranks


@pytest.fixture(scope="session")
def pair():
    with Crew(2) as ranks:
        assert not ranks.problems
        yield ranks
