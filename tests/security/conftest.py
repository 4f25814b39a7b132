from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from launched import Launched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launched import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts real jobs, and ends whatever a failing test leaves of them."""
    jobs: list[Launched] = []

    def start(*words: str, **how: object) -> Launched:
        jobs.append(Launched(tmp_path / f"job{len(jobs)}", *words, **how))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()
