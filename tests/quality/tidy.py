"""What can be told of a module from its syntax tree: each check takes a module and says what is wrong with it."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import floor_plan as plan

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ("launcher", "rendezvous", "ddp")
PACKAGES = (*HOUSE, plan.WINGS)


@dataclass(frozen=True)
class Module:
    name: str  # launcher.template.warm
    source: str

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def part(self) -> str:
        """The name that the floor plan knows: the first below the package, two in a package that has a core itself."""
        return part_of(self.name)

    @property
    def is_core(self) -> bool:
        return self.part in plan.CORE[self.package]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


def part_of(name: str) -> str:
    words, depth = name.split("."), 2
    while len(words) > depth and ".".join(words[:depth]) in plan.CORE_AND_SHELL:
        depth += 1
    return ".".join(words[1:depth]) or "__init__"


def module_at(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return Module(".".join(parts).removesuffix(".__init__"), path.read_text())


def modules() -> list[Module]:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [module_at(path) for path in paths if "pb" not in path.relative_to(ROOT).parts]


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Every module that is imported, wherever in the file; `from a import b` names both a and a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module.name, node)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func) in (
            "import_module",
            "importlib.import_module",
        ):
            named = node.args[0]
            yield node.lineno, str(named.value) if isinstance(named, ast.Constant) else "?"


def _absolute(importer: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parent = importer.split(".")[: -node.level]
    return ".".join([*parent, *([node.module] if node.module else [])])


def names_of_cuda(module: Module) -> list[str]:
    """`torch.cuda`, and the name of that device as text; ours is to run on any device that torch knows."""
    found = []
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                found.append(node.lineno)
            case ast.Constant(value=str(text)) if text == "cuda" or text.startswith("cuda:"):
                found.append(node.lineno)
            case ast.ImportFrom(module="torch", names=names) if any(name.name == "cuda" for name in names):
                found.append(node.lineno)
    return [
        f"{module.name}:{line} names CUDA: use torch.accelerator, or ddp.groups.accelerator" for line in found
    ]


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
        case _:
            return ""


# --- who may import whom ---------------------------------------------------------------------------


def wrong_imports(module: Module) -> list[str]:
    found = ((line, name, _why_not(module, name)) for line, name in imports(module))
    return [f"{module.name}:{line} imports {name}: {why}" for line, name, why in found if why]


def _why_not(module: Module, name: str) -> str:
    top = name.partition(".")[0]
    if top == plan.WINGS and module.package != plan.WINGS:
        return "the house imports no wing: it opens a door (_ddp_launch_entry.py)"
    if top == plan.DOORS:
        return "a core module opens no door" if module.is_core else ""
    if module.package == plan.WINGS:
        return _why_not_in_a_wing(module, name)
    if top == "torch" and module.package != "ddp":
        may = module.name in plan.MAY_IMPORT_TORCH
        return "" if may else "torch is not for launcher and rendezvous"
    if top in ("_ddp_launch", "_ddp_launch_rank", "sitecustomize"):
        return "" if module.name in plan.ZYGOTE_ONLY | {_HOOK} else "only the zygote has it"
    if top in PACKAGES:
        return _why_not_ours(module, name)
    if top in sys.stdlib_module_names:
        impure = module.is_core and top not in plan.PURE_STDLIB
        return "a core module has no use for it" if impure else ""
    if module.is_core or top not in plan.THIRD_PARTY[module.package]:
        return "not one of the packages that the floor plan allows here"
    return ""


def _why_not_in_a_wing(module: Module, name: str) -> str:
    wing = plan.WINGS_NEED.get(room_of(module.name), plan.Needs())
    top = name.partition(".")[0]
    if top == plan.WINGS:
        other = room_of(name) not in ("", room_of(module.name))
        return "a wing imports no other wing" if other else _why_not_ours(module, name)
    if top in HOUSE:
        needed = any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in wing.house)
        return (
            "" if needed else f"not part of what the floor plan lets {room_of(module.name)} use of the house"
        )
    if top in sys.stdlib_module_names:
        impure = module.is_core and top not in plan.PURE_STDLIB
        return "a core module has no use for it" if impure else ""
    return "" if top in wing.packages and not module.is_core else "not one of the packages of this wing"


_HOOK = "launcher.template.hook.sitecustomize"


def _why_not_ours(module: Module, name: str) -> str:
    package = name.partition(".")[0]
    kind = "core" if module.is_core else "shell"
    if package != module.package and module.name not in plan.NAMES_OF_A_CORE:
        allowed = plan.ABROAD.get((module.package, kind), set())
        ancestor = any(each == name or each.startswith(name + ".") for each in allowed)
        within = any(name.startswith(each + ".") for each in allowed)
        return "" if ancestor or within else f"not for the {kind} of {module.package}"
    if module.is_core and is_shell(name):
        return "a core module imports no shell"
    for house, rooms in plan.ROOMS.items():
        if why := _wrong_room(house, rooms, module, name):
            return why
    in_zygote = any(name == each or name.startswith(each + ".") for each in plan.ZYGOTE_ONLY)
    if in_zygote and not module.name.startswith("launcher.template"):
        return "it belongs to the zygote's process"
    return ""


def is_shell(name: str) -> bool:
    """Whether this is the name of a module that is not pure; a name that a module defines belongs to the module."""
    package = name.partition(".")[0]
    if name in plan.NAMES_OF_A_CORE:
        return False
    return name in names_of_modules() and name != package and part_of(name) not in plan.CORE[package]


@cache
def names_of_modules() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def room_of(name: str, house: str = "") -> str:
    """The first name below the house: a package, or a room with rooms of its own."""
    house = house or name.partition(".")[0]
    return name.removeprefix(f"{house}.").partition(".")[0] if name.startswith(f"{house}.") else ""


def _wrong_room(house: str, rooms: dict[str, set[str]], module: Module, name: str) -> str:
    here, there = room_of(module.name, house), room_of(name, house)
    if not here or here == there or there not in rooms:  # __init__ hands out public names of every room
        return ""
    return "" if there in rooms.get(here, set()) else f"{here} does not import {there}"


def rooms_that_import_each_other(rooms: dict[str, set[str]]) -> list[str]:
    """Rooms on a cycle: what remains after rooms that import none of the rest are removed, again and again."""
    rest = dict(rooms)
    while leaves := [room for room, others in rest.items() if not others & rest.keys()]:
        for room in leaves:
            del rest[room]
    return sorted(rest)


def importers(all_modules: list[Module]) -> dict[str, dict[str, set[str]]]:
    """The modules that import each module, and when: "run" at its import, "late" in a function, "type" for types."""
    known = {module.name for module in all_modules}
    found: dict[str, dict[str, set[str]]] = {name: {} for name in known}
    for module in all_modules:
        for name, when in _imported(module, module.tree, known, "run"):
            if name != module.name:
                found[name].setdefault(module.name, set()).add(when)
    return found


def _imported(module: Module, node: ast.AST, known: set[str], when: str) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=names):
            yield from ((each.name, when) for each in names if each.name in known)
        case ast.ImportFrom(names=names):
            base = _absolute(module.name, node)
            below = [f"{base}.{each.name}" for each in names if f"{base}.{each.name}" in known]
            yield from ((name, when) for name in below)
            if base in known and len(below) < len(names):
                yield base, when
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            when = "late"
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            when = "type"
    for child in ast.iter_child_nodes(node):
        yield from _imported(module, child, known, when)


def chapters(all_modules: list[Module]) -> list[str]:
    """Modules that only one other module imports, of the same folder, without a reason that the code shows.

    A pure core that a shell imports has one, and so has a module that is imported late, to start sooner.
    """
    by_name = {module.name: module for module in all_modules}
    found = []
    for name, users in importers(all_modules).items():
        if len(users) != 1:
            continue
        user, when = next(iter(users.items()))
        same_folder = user.rpartition(".")[0] == name.rpartition(".")[0]
        if same_folder and by_name[user].is_core == by_name[name].is_core and "run" in when:
            found.append(name)
    return sorted(set(found) - plan.MAY_HAVE_ONE_IMPORTER.keys())


def shared_names(all_modules: list[Module]) -> list[str]:
    """Names of classes, and of files, that stand for several things: a search for one finds the others."""
    classes = [
        (node.name, module.name)
        for module in all_modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    files = [(f"{module.name.rpartition('.')[2]}.py", module.name) for module in all_modules]
    places: dict[str, set[str]] = {}
    for name, where in (*classes, *files):
        places.setdefault(name, set()).add(where)
    return sorted(name for name, found in places.items() if len(found) > 1)


def circles(all_modules: list[Module]) -> list[list[str]]:
    """Groups of modules of which each imports each other one, directly or not; imports for types count."""
    users = importers(all_modules)
    reach = {name: _reachable(name, users) for name in users}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in reach}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reachable(start: str, users: dict[str, dict[str, set[str]]]) -> set[str]:
    found, ahead = set(), [start]
    while ahead:
        for name in users[ahead.pop()]:
            if name not in found:
                found.add(name)
                ahead.append(name)
    return found


# --- purity ----------------------------------------------------------------------------------------


def impurities(module: Module) -> list[str]:
    tree = module.tree
    hashing = {
        id(call)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__hash__"
        for call in ast.walk(node)
    }
    nodes = (node for node in ast.walk(tree) if id(node) not in hashing)
    found = [(node, why) for node in nodes if (why := _impure(module, node))]
    return [f"{module.name}:{getattr(node, 'lineno', 0)}: {why}" for node, why in found]


def _impure(module: Module, node: ast.AST) -> str:
    match node:
        case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            return "a core module awaits nothing"
        case ast.Call(func=ast.Name(id=name)) if name in plan.IMPURE_CALLS:
            return f"{name}() is not for a core module"
        case ast.Attribute(value=ast.Name(id="signal"), attr=attr):
            known = attr in plan.PURE_SIGNAL or re.fullmatch(r"SIG[A-Z0-9]+", attr)
            return "" if known else f"signal.{attr} is not for a core module"
        case ast.For(iter=source) | ast.comprehension(iter=source) if _is_set(source):
            return "the order of a set depends on hashes"
        case ast.ClassDef():
            return _thawed(module, node)
        case ast.Global():
            return "a core module keeps no state of its own"
        case _:
            return ""


def _is_set(node: ast.expr) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.BinOp(left=left, right=right, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
            return _is_set(left) or _is_set(right)
        case ast.Call(
            func=ast.Name(id="list" | "tuple" | "enumerate" | "iter" | "reversed"), args=[first, *_]
        ):
            return _is_set(first)
        case _:
            return False


def _thawed(module: Module, node: ast.ClassDef) -> str:
    if f"{module.name}.{node.name}" in plan.MUTABLE_IN_CORE:
        return ""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if _dotted(call.func if call else decorator) not in ("dataclass", "dataclasses.dataclass"):
            continue
        options = {each.arg: each.value for each in call.keywords} if call else {}
        frozen = options.get("frozen")
        if not (isinstance(frozen, ast.Constant) and frozen.value is True):
            return f"{node.name} is not frozen"
    return ""


# --- size and words --------------------------------------------------------------------------------


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Each function with its length in lines."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{module.name}.{node.name}", node.end_lineno - node.lineno + 1


def too_long(module: Module) -> list[str]:
    lines = module.source.count("\n")
    found = [f"{module.name}: {lines} lines"] if lines > plan.MAX_FILE_LINES else []
    return found + [
        f"{name}: {length} lines" for name, length in functions(module) if length > plan.MAX_FUNCTION_LINES
    ]


def banned_names(module: Module) -> list[str]:
    found = [module.name] if _words(module.name.rpartition(".")[2]) & plan.BANNED_MODULES else []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if _words(node.name) & plan.BANNED_WORDS:
                found.append(f"{module.name}:{node.lineno} {node.name}")
    return found


def _words(name: str) -> set[str]:
    for of_torch in plan.TORCHS_WORDS:
        name = name.replace(of_torch, "")
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def prints(module: Module) -> list[str]:
    return [
        f"{module.name}:{node.lineno}: print"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _dotted(node.func) == "print"
    ]


def postponed(text: str) -> list[str]:
    """Notes of work that was put off."""
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    return [line.strip() for line in text.splitlines() if re.search(rf"\b({'|'.join(marks)})\b", line)]
