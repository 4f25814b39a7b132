"""The matrix: its cases are tests that exist, and docs/compatibility.md has the results that were recorded."""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import sys

import matrix
import pytest
from cases import _LIKE_TORCH, CASES, Case
from table import Column, Result, from_json, merged, rendered, results_of, to_json

from ddp.telemetry.torch_names import OLDEST

TWO = (
    Case("one", "this", ("tests/a/test_x.py",)),
    Case("two", "that", ("tests/test_y.py::test_it", "tests/test_y.py::test_more[a-1]")),
)
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_x" name="test_some"/>
<testcase classname="tests.a.test_x" name="test_other[1]">{other}</testcase>
<testcase classname="tests.test_y" name="test_it[x]">{it}</testcase>
<testcase classname="tests.test_y" name="test_more[a-2]"><failure message="of another case"/></testcase>
</testsuite></testsuites>"""


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


@pytest.mark.parametrize(
    ("other", "it", "one", "two"),
    [
        ("", "", Result("yes"), Result("yes")),
        ('<failure message="Boom&#10;more"/>', "", Result("fails", "Boom"), Result("yes")),
        ("", '<skipped message="not in this torch"/>', Result("yes"), Result("no", "not in this torch")),
        ('<skipped message="no"/>', '<error message="Bang"/>', Result("no", "no"), Result("fails", "Bang")),
    ],
)
def test_results_are_read_from_pytests_report(other: str, it: str, one: Result, two: Result) -> None:
    assert results_of(REPORT.format(other=other, it=it), TWO) == {"one": one, "two": two}


def test_a_file_that_cannot_be_imported_concerns_all_its_cases() -> None:
    report = '<testsuite><testcase name="tests.test_y"><error message="no module"/></testcase></testsuite>'
    assert results_of(report, TWO)["two"] == Result("fails", "no module")


def test_a_case_that_was_broken_off_is_not_called_passed() -> None:
    results = results_of(REPORT.format(other="", it=""), TWO, is_whole=False)
    assert (results["one"].outcome, results["two"].outcome) == ("yes", "-")
    failed = results_of(REPORT.format(other="", it='<failure message="Bang"/>'), TWO, is_whole=False)
    assert failed["two"] == Result("fails", "Bang")


def test_what_did_not_run_is_not_called_passed() -> None:
    assert {result.outcome for result in results_of("", TWO).values()} == {"-"}


def test_a_newer_result_replaces_an_older_one_and_columns_are_in_order() -> None:
    old = [
        Column("2.13.0+cpu", "3.11.7", 1),
        Column("2.8.0+cu128", "3.11.7", 1),
        Column("2.13.0", "3.9.1", 1),
    ]
    new = [Column("2.13.0", "3.11.7", 2)]
    assert [(column.torch, column.took_s) for column in merged(old, new)] == [
        ("2.8.0+cu128", 1),
        ("2.13.0", 1),
        ("2.13.0", 2),
    ]
    assert from_json(to_json(old)) == old


def test_a_column_can_be_asked_for_again() -> None:
    assert Column("2.8.0+cu128", "3.13.0", 1).wish == "2.8.0@3.13"
    mine = platform.python_version()
    assert matrix.interpreter("uv", "") == matrix.interpreter("uv", mine) == sys.executable
    with pytest.raises(matrix.NoInterpreter, match=r"Python 3\.1 is not installed here"):
        matrix.interpreter("false", "3.1")


def test_a_case_that_is_tried_again_leaves_the_others() -> None:
    old = Column("2.13.0", "3.11.7", 1, {"one": Result("fails", "Boom"), "two": Result("yes")})
    (column,) = merged([old], [Column("2.13.0", "3.11.7", 2, {"one": Result("yes")})])
    assert column.results == {"one": Result("yes"), "two": Result("yes")}


def test_the_table_has_a_note_for_each_reason() -> None:
    reason = "Gloo records nothing"
    results = {"one": Result("no", reason), "two": Result("yes")}
    text = rendered([Column("2.8.0", "3.11.7", 1, results), Column("2.9.1", "3.11.7", 1, results)], TWO)
    assert "| one | no (1) | no (1) |" in text
    assert "| two | yes | yes |" in text
    assert text.count(reason) == 1


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
