"""Private names of torch are listed in ddp/telemetry/torch_names.py, and looked up in torch_api only."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pytest
import tidy
import torch
from tidy import ROOT
from torch.nn.parallel import distributed

from ddp.reducer.logging_data import ReducerLogger
from ddp.reducer.torch_reducer import TorchReducer
from ddp.telemetry import torch_api, torch_names
from ddp.telemetry.torch_names import NAMES, Use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidy import Module

# The modules that a rank, the zygote or torch's own agent loads beside torch.
BESIDE_TORCH = ("ddp", "launcher.template", "launcher.preflight.self_test", "ddp_launch_wings")
MODULES = [
    module
    for module in tidy.modules()
    if module.name.startswith(BESIDE_TORCH) and module.name != "ddp.telemetry.torch_api"
]
LISTED = {name.name for name in NAMES} | torch_names.ON_OBJECTS.keys() | torch_names.GROUP_METHODS.keys()
# They have the names of torch's own classes, which torch's module calls.
OURS = {name for kind in (TorchReducer, ReducerLogger) for name in vars(kind)}
# Objects of torch come as arguments: a private attribute of anything must be listed, except in the launcher.
WITH_OBJECTS = ("ddp.", "ddp_launch_wings.torchrun", "ddp_launch_wings.mpi")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def imported_in(tree: ast.AST) -> dict[str, str]:
    """The names that imports bind, and the modules that they come from."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name.partition(".")[0]): each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: node.module or "" for each in node.names}
    return found


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def inherited() -> set[str]:
    """What `self` may have from a class of ours in another module."""
    return {name for module in MODULES for name in defined_in(module.tree)}


def unlisted(tree: ast.AST, with_objects: bool = True) -> Iterator[str]:
    """Names of torch that are private and looked up, and private attributes of objects that are not listed."""
    own, imported = defined_in(tree) | OURS, imported_in(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                parts = {*module.split("."), *(each.name for each in names)}
                yield from (f"from {module} import {part}" for part in parts if is_private(part))
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.startswith("torch._"))
            case ast.Attribute(attr=name) if is_private(name):
                origin = imported.get(root_of(node), "torch" if root_of(node) == "torch" else "")
                of_torch = origin.partition(".")[0] == "torch"
                is_elsewhere = bool(origin) and not of_torch
                known = LISTED | own | (inherited() if root_of(node) == "self" else set())
                if of_torch or (with_objects and not is_elsewhere and name not in known):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if is_private(name) and name not in own:
                    yield f"getattr(..., {name!r})"


@pytest.mark.parametrize("module", MODULES, ids=[module.name for module in MODULES])
def test_private_names_of_torch_are_looked_up_in_one_place(module: Module) -> None:
    assert not list(unlisted(module.tree, module.name.startswith(WITH_OBJECTS)))


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import Future",
        "from torch.distributed.utils import _sync_module_states",
        "import torch._dynamo",
        "import torch\ntorch._C.Future",
        "import torch.distributed as dist\ndist.Backend._plugins",
        "def late(group):\n    return group._get_backend_name()",
        "def late(group):\n    return getattr(group, '_get_backend_name', None)",
    ],
)
def test_a_private_name_elsewhere_is_found(source: str) -> None:
    assert list(unlisted(ast.parse(source)))


def test_names_of_ours_and_of_other_packages_are_not_torchs() -> None:
    source = (
        "import threading\nthreading._register_atexit\nclass A:\n    def f(self):\n        self._x = self._x"
    )
    assert not list(unlisted(ast.parse(source)))


def inheriting() -> list[type]:
    """Our classes that inherit from one of torch's."""
    for module in MODULES:
        if module.name.startswith("ddp.") and not module.name.endswith(("mpi", "__main__")):
            importlib.import_module(module.name)
    kinds = {
        kind
        for name, module in list(sys.modules.items())
        if name.startswith("ddp.")
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == name
    }
    return [kind for kind in kinds if any(base.__module__.startswith("torch") for base in kind.__mro__)]


def test_what_our_classes_override_is_listed() -> None:
    kinds = inheriting()
    assert len(kinds) > 3
    overridden = {
        name.name for name in NAMES if name.use is Use.OVERRIDDEN
    } | torch_names.GROUP_METHODS.keys()
    overridden |= {name.name for name in NAMES if name.use is Use.PATCHED}
    for kind in kinds:
        torchs = [base for base in kind.__mro__ if base.__module__.startswith("torch")]
        replaced = {name for name in vars(kind) if is_private(name) and any(name in vars(t) for t in torchs)}
        replaced.discard("_abc_impl")
        assert replaced <= overridden, f"{kind.__name__} overrides {sorted(replaced - overridden)}"


def test_the_installed_torch_has_what_the_list_says() -> None:
    here = torch_api.version()
    for name in NAMES:
        if name.instead and not name.is_in(here):
            continue
        owner: Any = resolve_name(name.owner)
        exists = (
            name.name in owner.__init__.__code__.co_names if name.set_in_init else hasattr(owner, name.name)
        )
        is_optional = name is torch_names.RECORD_OF_NCCL
        assert exists == name.is_in(here) or is_optional, f"{name.path} in torch {torch.__version__}"
    known = {lost for lost, _ in torch_api.problems().items()}
    assert known <= {name.loses for name in NAMES if not name.is_in(here)}


@pytest.mark.parametrize(("attribute", "ours"), [("reducer", TorchReducer), ("logger", ReducerLogger)])
def test_torchs_module_calls_only_what_our_reducer_has(attribute: str, ours: type) -> None:
    source = inspect.getsource(distributed)
    called = set(re.findall(rf"self\.{attribute}\.(\w+)\(", source))
    assert called
    assert called <= set(dir(ours))


def test_what_the_launcher_reads_of_torch_is_listed() -> None:
    listed = tuple(name.rstrip("*") for name in torch_names.LAUNCHER)
    for path in (
        ROOT / "launcher" / "health" / "flight_recorder.py",
        ROOT / "launcher" / "ranks" / "worker_env.py",
    ):
        for name in re.findall(r'"(TORCH\w+)"', path.read_text()):
            assert name.startswith(listed), f"{path.name} mentions {name}"
    for where in torch_names.LAUNCHER.values():
        module = where.partition(":")[0]
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
