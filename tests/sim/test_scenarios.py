"""Every file of tests/scenarios gives the transcript that it holds. REWRITE=1 writes what it gives now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sim_scenario import Scenario

FILES = sorted((Path(__file__).parents[1] / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    expected = path.read_text()
    given = Scenario().run(expected)
    if os.environ.get("REWRITE"):
        path.write_text(given)
    else:
        assert given == expected
