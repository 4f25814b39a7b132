"""Which tests are marked `nightly`, read from their source: to import them all would cost more than the check."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WHOLE, SOME_CASES = "", "[...]"


def marked(path: Path, name: str) -> set[str]:
    """`name` for a whole file, `name::test` for a test, `name::test[...]` where only some cases of it are marked."""
    tree = ast.parse(path.read_text())
    tainted = names_with_marks(tree.body)
    if "pytestmark" in tainted:
        return {name}
    found = set()
    for node in tree.body:
        how = how_marked(node, tainted)
        if how is not None:
            found.add(f"{name}::{node.name}{how}")  # type: ignore[attr-defined]
    return found


def names_with_marks(body: list[ast.stmt]) -> set[str]:
    """What is made of the mark at the top of the module, directly or by way of another name."""
    found: set[str] = set()
    for node in body:
        if not is_test(node) and (marks(node) or found & names_used(node)):
            found.update(names_of(node))
    return found


def names_used(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def how_marked(node: ast.stmt, tainted: set[str]) -> str | None:
    if not is_test(node):
        return None
    decorators = node.decorator_list  # type: ignore[attr-defined]
    if any(is_mark(each.func if isinstance(each, ast.Call) else each) for each in decorators):
        return WHOLE
    some = any(marks(each) or names_used(each) & tainted for each in decorators)
    return SOME_CASES if some else None


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
