"""Processes that a rank starts find the script's own classes, whichever way they are started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from side_by_side import ddp_launch, program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "method",
    ["spawn", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("fork", "forkserver"))],
)
def test_classes_of_the_script_travel(method: str, tmp_path: Path) -> None:
    program("offspring.py", tmp_path)
    ended = ddp_launch("offspring.py", method, cwd=tmp_path).ok()
    assert ended.out.splitlines() == [
        f"{method} pool [Point(x=2), Point(x=4)]",
        f"{method} executor Point(x=6)",
        f"{method} loader [0, 1, 2, 3, 4, 5, 6, 7]",
        f"{method} process Point(x=5) None 0",
    ]
    assert ended.err == ""
