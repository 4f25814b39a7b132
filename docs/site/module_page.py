"""The page of all rooms and modules: from their docstrings, and from the floor plan that the tests check."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "quality"))

import ast

import floor_plan
import tidy

_HEAD = """# Modules

What each room and module is for, in the words of its docstring. A *core* is pure; everything else is shell
([architecture](../architecture.md)).
"""


def modules() -> str:
    return _HEAD + "".join(_package(package) for package in tidy.PACKAGES)


def _package(package: str) -> str:
    lines = [f"\n## {package}\n\n| module | what it is for | core | may import |\n|---|---|---|---|\n"]
    for module in tidy.modules():
        if module.package != package or module.name == package:
            continue
        house = max((each for each in floor_plan.ROOMS if module.name.startswith(f"{each}.")), key=len)
        room = tidy.room_of(module.name, house)
        is_room = module.name == f"{house}.{room}"
        imports = ", ".join(sorted(floor_plan.ROOMS[house].get(room, ()))) or "-" if is_room else ""
        lines.append(
            f"| `{module.name}` | {_purpose(module)} | {'core' if module.is_core else ''} | {imports} |\n"
        )
    return "".join(lines)


def _purpose(module: tidy.Module) -> str:
    return (ast.get_docstring(module.tree) or "").partition("\n")[0].replace("|", "\\|")
