"""Each tutorial of the site, done from top to bottom in an empty folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from page_player import play
from tidy import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NIGHTLY = (
    "debug-a-hang",
    "diloco",
    "elastic-training",
    "find-a-slow-rank",
    "first-job",
    "fsdp2-and-hsdp",
    "two-machines",
)  # each takes tens of seconds


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.nightly] * (page.stem in NIGHTLY))
        for page in PAGES
    ],
)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    play(page, tmp_path)
