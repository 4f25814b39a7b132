"""What is recorded of torchrun is what the installed one answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from recordings import ASKED, FILE, asked, recorded

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.nightly(
    instead=(
        "::test_a_file_holds_every_answer",
        "contract/test_same_environment.py::test_as_under_torchrun",
        "contract/test_same_main.py::test_as_under_torchrun",
    )
)
@pytest.mark.parametrize("name", ASKED)
def test_torchrun_answers_as_recorded(name: str) -> None:
    if not FILE.exists():
        pytest.skip(f"there is no {FILE.name}, so every test asks torchrun itself; `make record` writes it")
    assert asked(name) == recorded()[name]


@pytest.mark.parametrize("path", sorted(FILE.parent.glob("*.json")), ids=lambda path: path.name)
def test_a_file_holds_every_answer(path: Path) -> None:
    assert set(json.loads(path.read_text())) == set(ASKED)
