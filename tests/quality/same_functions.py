"""Shows that files were only moved together: what they define is the same in two revisions.

    python tests/quality/same_functions.py REVISION [REVISION] [--paths rendezvous launcher] [--renamed OLD=NEW ...]

Compares each function, class, and other statement at the top of a module, whichever module it is in. Imports,
docstrings of modules and comments do not count, and `chapter.told` of an imported module is the same as `told`.
Without a second revision, the first is compared with the files of the working tree. Prints each difference, and
returns 1 if there is any.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("launcher", "rendezvous", "ddp", "ddp_launch_wings")
GENERATED = "/pb/"


def definitions(source: str, renamed: dict[str, str]) -> set[str]:
    """Each statement of a module, as text without comments, and without imports wherever they stand."""
    tree = ast.parse(source)
    tree = _WithoutImports(set(_imported_modules(tree))).visit(tree)
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return {_with_new_names(ast.unparse(node), renamed) for node in body}


def _with_new_names(text: str, renamed: dict[str, str]) -> str:
    for old, new in renamed.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}\b", new, text)
    return text


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    """The names of modules of ours; a name in lower case is one, or a function, which has no attributes."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    variables = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    variables |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").partition(".")[0] in PACKAGES
        ):
            found = {each.asname or each.name for each in node.names if each.name.islower()}
            yield from found - variables


class _WithoutImports(ast.NodeTransformer):
    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        of_module = isinstance(node.value, ast.Name) and node.value.id in self._modules
        return ast.Name(node.attr, node.ctx) if of_module else node

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """`if TYPE_CHECKING:` goes with the imports in it."""
        self.generic_visit(node)
        return node if node.body or node.orelse else None


def differences(before: list[str], after: list[str], renamed: dict[str, str]) -> list[str]:
    """The first line of each definition that only one side has, after `-` or `+`."""
    old = {text for source in before for text in definitions(source, renamed)}
    new = {text for source in after for text in definitions(source, renamed)}
    gone = [f"- {text}" for text in sorted(old - new)]
    come = [f"+ {text}" for text in sorted(new - old)]
    return [text.partition("\n")[0] for text in (*gone, *come)]


def sources(revision: str, paths: list[str]) -> list[str]:
    if not revision:
        files = (file for path in paths for file in Path(path).rglob("*.py"))
        return [file.read_text() for file in sorted(files) if GENERATED not in file.as_posix()]
    listed = _git("ls-tree", "-r", "--name-only", revision, "--", *paths)
    files = [name for name in listed.splitlines() if name.endswith(".py") and GENERATED not in name]
    return [_git("show", f"{revision}:{name}") for name in files]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="")
    parser.add_argument("--paths", nargs="+", default=list(PACKAGES))
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW")
    given = parser.parse_args(argv)
    renamed = dict(pair.split("=") for pair in given.renamed)
    found = differences(sources(given.before, given.paths), sources(given.after, given.paths), renamed)
    print("\n".join(found) if found else "the same definitions")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
