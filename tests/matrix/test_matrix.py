"""The matrix: its cases are tests that exist, and docs/compatibility.md has the results that were recorded."""

from __future__ import annotations

import ast
import importlib
import json
import re

import matrix
import pytest
from cases import _LIKE_TORCH, CASES, Case
from table import from_json, rendered

from ddp.telemetry.torch_names import OLDEST


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_tests_of_a_case_exist(case: Case) -> None:
    assert case.tests
    for reference in case.tests:
        name, _, test = reference.partition("::")
        tree = ast.parse((matrix.ROOT / name).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not test or test.partition("[")[0] in functions, reference


def test_the_cases_beside_torchs_class_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not exist ends pytest before it runs anything."""
    monkeypatch.syspath_prepend(str(matrix.ROOT / "tests/contract/ddp_like_torch"))
    parameters = importlib.import_module("test_like_torch").parameters
    there = {f"test_the_two_cannot_be_told_apart[{each.id}]" for each in parameters()}
    named = [test for case in CASES for test in case.tests if test.startswith(_LIKE_TORCH)]
    assert len(named) > 10
    assert [test for test in named if test.rpartition("::")[2] not in there] == []


def test_the_page_has_the_recorded_results() -> None:
    columns = from_json(json.loads(matrix.RESULTS.read_text()))
    _, _, rest = matrix.PAGE.read_text().partition(matrix.BEGIN)
    assert rest.partition(matrix.END)[0].strip() == rendered(columns).strip()
    assert columns[0].key[0][:2] == OLDEST, (
        "the oldest release that is supported is not the oldest one that was tried"
    )
    assert {name for column in columns for name in column.results} <= {case.name for case in CASES}


def test_the_promise_is_what_was_tried() -> None:
    oldest = ".".join(map(str, OLDEST))
    assert re.search(
        rf'^torch = \["torch>={re.escape(oldest)}"\]$', (matrix.ROOT / "pyproject.toml").read_text(), re.M
    )
    assert f"- pytorch >={oldest}\n" in (matrix.ROOT / "deploy/conda/recipe.yaml").read_text()
    assert f"torch {oldest}" in matrix.PAGE.read_text()
