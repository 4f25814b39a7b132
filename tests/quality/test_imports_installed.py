"""What code imports is installed by the `make` target that runs the code."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"ddp", "launcher", "rendezvous", "_ddp_launch", "_ddp_launch_rank"}
OURS |= {"ddp_launch_wings", "_ddp_launch_entry"}
OURS |= {"sitecustomize", "__main__"}
INSTALLED = ("torch", "install")
# Folders, and the lists in requirements/ that the target installs which runs them.
TARGETS = {
    ("launcher", "rendezvous", "ddp", "ddp_launch_wings"): INSTALLED,
    ("examples",): INSTALLED,
    ("docs",): (*INSTALLED, "site"),
    ("bench",): (*INSTALLED, "bench"),
    ("tests",): (*INSTALLED, "test", "unchanged"),
    ("requirements",): (*INSTALLED, "test", "tools"),
}
# For those who have them: a backend, the page, and what a bench compares with.
OPTIONAL = {
    "accelerate": "examples",
    "lightning": "examples",
    "transformers": "examples",
    "cloudpickle": "ddp",
    "mpi4py": "ddp_launch_wings",
    "torchft": "bench",
    "nvidia_resiliency_ext": "bench",
    "torchsnapshot": "bench",
    "starlette": "ddp_launch_wings",
    "uvicorn": "ddp_launch_wings",
}
NOT_HERE = {
    "cyclonedx": "cyclonedx-python-lib"
}  # in an environment of its own: its metadata are not installed here


def local_names() -> set[str]:
    """What scripts and tests import from beside them."""
    files = [
        path
        for folder in ("bench", "deploy", "docs", "examples", "tests", "requirements")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return {path.stem for path in files} | {path.parent.name for path in files}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - OURS


def distributions(folders: tuple[str, ...]) -> dict[str, Path]:
    """What the folders import: each with a file that does."""
    local, known = local_names(), packages_distributions()
    found: dict[str, Path] = {}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for name in (
                imported(path) - local - {each for each, where in OPTIONAL.items() if where == folder}
            ):
                found[canonical(known.get(name, [NOT_HERE.get(name, name)])[0])] = path
    return found


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def locked(name: str) -> set[str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {canonical(each) for each in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


@pytest.mark.parametrize("folders", TARGETS, ids="+".join)
def test_what_is_imported_is_installed_by_the_target(folders: tuple[str, ...]) -> None:
    listed = set[str]().union(*(locked(name) for name in TARGETS[folders]))
    found = distributions(folders)
    assert {name: path for name, path in found.items() if name not in listed} == {}
    assert folders == ("examples",) or found, "or nothing was read"
