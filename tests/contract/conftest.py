from __future__ import annotations

import pytest
from launched import make_fake_torch


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment for warm starts of scripts without torch: its import is most of what such a start costs."""
    return {"PYTHONPATH": make_fake_torch(tmp_path_factory.mktemp("light"))}
