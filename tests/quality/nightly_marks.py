"""Which tests are marked `nightly`, read from their source: to import them all would cost more than the check.

A test that `make test` leaves out as a whole says what stays: `@pytest.mark.nightly(instead="core/test_x.py::test_y")`,
relative to `tests/`, or `::test_z` in the same file. A mark without an argument leaves out some cases of a test, and
the other cases stay.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WHOLE_FILE = ""


@dataclass(frozen=True)
class Mark:
    test: str  # or WHOLE_FILE
    instead: tuple[str, ...] = ()
    some_cases: bool = False


def marked(path: Path) -> list[Mark]:
    tree = ast.parse(path.read_text())
    named = names_with_marks(tree.body)
    if "pytestmark" in named:
        return [Mark(WHOLE_FILE, named["pytestmark"])]
    return [mark for node in tree.body if is_test(node) and (mark := mark_of(node, named)) is not None]


def names_with_marks(body: list[ast.stmt]) -> dict[str, tuple[str, ...]]:
    """What is made of the mark at the top of the module, directly or by way of another name."""
    found: dict[str, tuple[str, ...]] = {}
    for node in body:
        if not is_test(node) and (marks(node) or found.keys() & names_used(node)):
            found.update(dict.fromkeys(names_of(node), instead_of(node)))
    return found


def names_used(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def mark_of(node: ast.stmt, named: dict[str, tuple[str, ...]]) -> Mark | None:
    name, decorators = node.name, node.decorator_list  # type: ignore[attr-defined]
    for each in decorators:
        if is_mark(each.func if isinstance(each, ast.Call) else each):
            return Mark(name, instead_of(each))
        if isinstance(each, ast.Name) and each.id in named:
            return Mark(name, named[each.id])
    some = any(marks(each) or names_used(each) & named.keys() for each in decorators)
    return Mark(name, some_cases=True) if some else None


def instead_of(node: ast.AST) -> tuple[str, ...]:
    """The argument of the mark in this statement."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and is_mark(part.func):
            (given,) = [ast.literal_eval(each.value) for each in part.keywords if each.arg == "instead"]
            return (given,) if isinstance(given, str) else given
    return ()


def is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.nightly"


def marks(node: ast.AST) -> bool:
    return any(is_mark(part) for part in ast.walk(node))


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return [node.name] if isinstance(node, ast.FunctionDef) else []


def names_of_tests(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if is_test(node)}  # type: ignore[attr-defined]
