"""The table of mutants follows the product: what a mutant replaces stands once in its file, and its tests exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))

from product_mutants import MUTANTS, ROOT  # noqa: E402


@pytest.mark.parametrize(("file", "tests", "mutants"), MUTANTS)
def test_what_a_mutant_replaces_stands_once(
    file: str, tests: str, mutants: list[tuple[str, str, str]]
) -> None:
    source = (ROOT / file).read_text()
    assert [name for name, old, _ in mutants if source.count(old) != 1] == []
    assert [each for each in tests.split() if not (TESTS / each).exists()] == []
