"""The tree keeps to its floor plan and its habits; and the checks can tell when it does not."""

from __future__ import annotations

import subprocess
import sys

import floor_plan as plan
import pytest
import tidy
from tidy import ROOT, Module

MODULES = tidy.modules()
NAMES = [module.name for module in MODULES]
WRITTEN_HERE = (
    *tidy.PACKAGES,
    "tests",
    "bench",
    "examples",
    "docs",
    "deploy",
    "requirements",
    "proto",
    ".ci",
)


def tree(*suffixes: str):
    folders = (ROOT / name for name in WRITTEN_HERE)
    found = (path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in suffixes)
    return [path for path in found if "pb" not in path.parts and "__pycache__" not in path.parts]


def test_the_floor_plan_names_modules_that_exist():
    for package in tidy.PACKAGES:
        there = {module.part for module in MODULES if module.package == package}
        assert not plan.CORE[package] - there, f"on the floor plan, not in {package}"


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_imports_follow_the_floor_plan(module):
    assert not tidy.wrong_imports(module)


def test_rooms_are_floors_above_each_other():
    for house, rooms in plan.ROOMS.items():
        there = {tidy.room_of(module.name, house) for module in MODULES} - {""}
        assert rooms.keys() == there, f"the rooms of {house}"
        assert not tidy.rooms_that_import_each_other(rooms)
    assert tidy.rooms_that_import_each_other({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.is_core], ids=[m.name for m in MODULES if m.is_core]
)
def test_core_is_pure(module):
    assert not tidy.impurities(module)


def test_torch_is_not_loaded_by_any_module_of_the_launcher_or_the_rendezvous():
    run_at_import = {
        "launcher.__main__",
        "launcher.template.plain_zygote",
        "launcher.template.hook.sitecustomize",
    }
    ours = [n for n in NAMES if n.startswith(("launcher", "rendezvous"))]
    names = [name for name in ours if name not in run_at_import]
    program = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
    program += "sys.exit(', '.join(n for n in ('torch', 'numpy', 'ddp') if n in sys.modules) or None)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_starts_light():
    """Nothing heavy stands between the command and its first word to the user."""
    heavy = {"asyncio", "grpc", "logging", "multiprocessing", "subprocess", "tomllib", "unittest"}
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import launcher.cli, launcher.start\n"
        f"sys.exit(', '.join(sorted({heavy!r} & set(sys.modules))) or None)"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["launcher", "rendezvous.main", "rendezvous.control.ctl"])
def test_help_needs_no_heavy_packages(program):
    """A fold may put a section that needs gRPC into a module that every command loads."""
    heavy = ("grpc", "google.protobuf", "numpy", "starlette", "torch", "uvicorn")
    script = (
        f"import runpy, sys; sys.argv = ['a command', '--help']\n"
        f"try: runpy.run_module({program!r}, run_name='__main__')\n"
        f"except SystemExit as end: assert not end.code, end.code\n"
        f"sys.exit(', '.join(name for name in {heavy!r} if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_files_and_functions_are_small():
    assert not [each for module in MODULES for each in tidy.too_long(module)]
    lengths = sorted(length for module in MODULES for _, length in tidy.functions(module))
    assert lengths[len(lengths) * 9 // 10] <= plan.P90_FUNCTION_LINES
    product = {ROOT / package for package in tidy.PACKAGES}
    for path in tree(".py"):
        if not product & set(path.parents):
            assert path.read_text().count("\n") <= plan.MAX_TEST_FILE_LINES, path


def test_a_module_with_one_importer_has_a_reason():
    """Others are sections of their importer: a reader should not need to open a file for each."""
    chapters = tidy.chapters(MODULES)
    assert not chapters, f"fold these into their importers: {chapters}"
    assert plan.MAY_HAVE_ONE_IMPORTER.keys() <= set(NAMES), "a reason for a module that does not exist"


def test_house_and_wings_stay_within_their_budgets():
    """A reader is to hold the house in the head: what is added pays for its room."""
    house = [module for module in MODULES if module.package != plan.WINGS]
    wings = [module for module in MODULES if module.package == plan.WINGS]
    doors = (ROOT / f"{plan.DOORS}.py").read_text().count("\n")
    assert len(house) + 1 <= plan.MOST_HOUSE_FILES
    assert sum(module.source.count("\n") for module in house) + doors <= plan.MOST_HOUSE_LINES
    assert len(wings) <= plan.MOST_WING_FILES
    assert sum(module.source.count("\n") for module in wings) <= plan.MOST_WING_LINES


def test_tests_stay_within_their_budget():
    """A test is read, and waited for, by everybody: a stronger one takes the place of a weaker one."""
    tests = {path: path.read_text().count("\n") for path in tree(".py") if ROOT / "tests" in path.parents}
    assert sum(tests.values()) <= plan.MOST_TEST_LINES
    support = sum(lines for path, lines in tests.items() if not path.name.startswith("test_"))
    assert support <= plan.MOST_TEST_SUPPORT_LINES


def test_the_house_does_not_name_a_wing():
    """No import of any kind, late or by name, and no path: what the house knows of a wing is its name behind a door."""
    house = [module for module in MODULES if module.package != plan.WINGS]
    assert not [module.name for module in house if plan.WINGS in module.source]
    for wing in plan.WINGS_NEED:
        assert (ROOT / plan.WINGS / wing / "__init__.py").exists()
        assert list((ROOT / "tests" / "wings" / wing).glob("test_*.py")), (
            f"the wing {wing} has no tests of its own"
        )


def test_one_name_is_one_thing():
    """Both may only fall. The rest is in the wings, or a program's `__main__`."""
    names = tidy.shared_names(MODULES)
    files = [name for name in names if name.endswith(".py") and name != "__main__.py"]
    assert len(files) <= plan.MOST_SHARED_FILE_NAMES, files
    classes = [name for name in names if not name.endswith(".py")]
    assert len(classes) <= plan.MOST_SHARED_CLASS_NAMES, classes
    twice = [
        Module("ddp.a.one", "class Peer: pass"),
        Module("ddp.b.one", "class Peer: pass\nclass Other: pass"),
    ]
    assert tidy.shared_names(twice) == ["Peer", "one.py"]


def test_no_modules_import_each_other():
    assert not tidy.circles(MODULES)


def test_names_say_what_a_thing_is():
    assert not [each for path in tree(".py") for each in tidy.banned_names(tidy.module_at(path))]


def test_nothing_is_printed_past_the_terminal():
    silent = (module for module in MODULES if module.name not in plan.MAY_PRINT)
    assert not [each for module in silent for each in tidy.prints(module)]


def test_nothing_is_put_off():
    top = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml") or path.name == "Makefile"]
    for path in [*top, *tree(".py", ".md", ".sh", ".proto", ".yaml", ".toml")]:
        assert not tidy.postponed(path.read_text()), path


def test_ddp_runs_on_any_device():
    ours = [module for module in MODULES if module.package == "ddp"]
    naming = {module.name for module in ours if tidy.names_of_cuda(module)}
    assert naming == plan.MAY_NAME_CUDA


def test_proto_is_no_package():
    """`proto` as a name to import belongs to proto-plus."""
    assert not list((ROOT / "proto").rglob("__init__.py"))


# --- the checks can fail -----------------------------------------------------------------------------

WRONG_IMPORTS = [
    ("launcher.agent", "import torch"),
    ("launcher.agent", "def late():\n    from torch.distributed import TCPStore"),
    ("launcher.agent", "import importlib\nimportlib.import_module('torch')"),
    ("rendezvous.service.owner", "if True:\n    import torch.nn"),
    ("rendezvous.service.owner", "import launcher.settings.spec"),
    ("rendezvous.machine", "from rendezvous.service import owner"),
    ("rendezvous.machine", "from .service.owner import JobOwner"),
    ("launcher.agent", "from rendezvous.machine import step"),
    ("launcher.agent", "from rendezvous import machine"),
    ("launcher.supervision", "from rendezvous.client.session import Session"),
    ("launcher.supervision", "from launcher.agent import Agent"),
    ("launcher.supervision", "import time"),
    ("launcher.supervision", "import os"),
    ("launcher.supervision", "import asyncio"),
    ("launcher.agent", "from launcher.template import store"),
    ("launcher.agent", "from launcher.template.warm import enter"),
    ("launcher.agent", "import grpc"),
    ("launcher.agent", "import psutil"),
    ("launcher.agent", "import ddp"),
    ("ddp", "import launcher"),
    ("ddp", "from rendezvous import types"),
    ("launcher.cli", "def late():\n    from ddp_launch_wings.plan import command"),
    ("launcher.cli", "import importlib\nimportlib.import_module('ddp_launch_wings.plan')"),
    ("launcher.supervision", "import _ddp_launch_entry"),
    ("ddp_launch_wings.plan.command", "import launcher.agent"),
    ("ddp_launch_wings.plan.command", "import torch"),
    ("ddp_launch_wings.plan.command", "from ddp_launch_wings.submit import job"),
    ("ddp_launch_wings.plan.prediction", "import time"),
    ("ddp_launch_wings.plan.prediction", "from ddp_launch_wings.plan import command"),
]


@pytest.mark.parametrize(("name", "source"), WRONG_IMPORTS)
def test_a_wrong_import_is_seen(name, source):
    assert tidy.wrong_imports(Module(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("launcher.template.store", "def keep():\n    import torch.distributed"),
        ("launcher.agent", "from rendezvous.values.events import Stop"),
        ("launcher.agent", "from launcher.template import tree"),
        ("launcher.supervision", "from rendezvous.values.types import AgentId"),
        ("ddp", "import torch"),
        ("ddp_launch_wings.torchrun.backend", "import torch"),
        ("rendezvous.service.owner", "import grpc, asyncio"),
    ],
)
def test_a_right_import_is_none(name, source):
    assert not tidy.wrong_imports(Module(name, source))


@pytest.mark.parametrize(
    "source",
    [
        "async def step(): pass",
        "def step():\n    return open('x')",
        "def step(state):\n    print(state)",
        "import signal\nsignal.signal(15, None)",
        "def step(a):\n    for x in set(a): pass",
        "def step(a):\n    return [x for x in {1, 2}]",
        "def step(a):\n    return [x for x in list(set(a) - {1})]",
        "@dataclass\nclass State: pass",
        "@dataclass(slots=True)\nclass State: pass",
        "def step():\n    global count",
    ],
)
def test_an_impurity_is_seen(source):
    assert tidy.impurities(Module("launcher.supervision", source))


def test_length_names_prints_and_notes_are_seen():
    long = "def f():\n" + "    pass\n" * plan.MAX_FUNCTION_LINES
    assert tidy.too_long(Module("launcher.agent", long))
    assert tidy.too_long(Module("launcher.agent", "\n" * (plan.MAX_FILE_LINES + 1)))
    assert not tidy.too_long(Module("launcher.agent", long.replace("    pass\n", "", 1)))
    for bad in ("class WorkerManager: pass", "def helper_of(x): pass", "def f_utils(): pass"):
        assert tidy.banned_names(Module("launcher.agent", bad))
    assert tidy.banned_names(Module("launcher.common", ""))
    assert not tidy.banned_names(Module("launcher.agent", "def handle_of(): pass"))
    assert tidy.prints(Module("launcher.agent", "def f():\n    print(1)"))
    assert tidy.postponed("x = 1  # " + "TO" + "DO later")


def test_chapters_and_circles_are_seen():
    book = Module(
        "ddp.elastic.book", "from ddp.elastic.chapter import a\ndef f():\n    import ddp.elastic.late\n"
    )
    others = [Module(f"ddp.elastic.{name}", "") for name in ("chapter", "late")]
    assert tidy.chapters([book, *others]) == ["ddp.elastic.chapter"]
    reader = Module("ddp.elastic.reader", "from ddp.elastic import chapter, late")
    assert tidy.chapters([book, reader, *others]) == []
    assert tidy.circles([book, reader, *others]) == []
    back = "if TYPE_CHECKING:\n    from ddp.elastic.book import B"
    assert tidy.circles([book, Module("ddp.elastic.chapter", back), others[1]]) == [
        ["ddp.elastic.book", "ddp.elastic.chapter"]
    ]


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "x = device.type == 'cuda'",
        "torch.device('cuda:0')",
        "from torch import cuda",
    ],
)
def test_a_device_by_name_is_seen(source):
    assert tidy.names_of_cuda(Module("ddp.reducer.bucket_sender", source))


def test_no_two_files_of_tests_have_one_name():
    """Their folders are all on one path: the second would be taken for the first. Programs are not imported."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "programs"]
    names = [path.name for path in modules if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(set(names)) == sorted(names)
