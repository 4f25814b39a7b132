"""A script, or what lies beside it, may have any name: ours, torch's, the standard library's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ports import free_port
from side_by_side import PLAIN, WARM, ddp_launch, python, script

if TYPE_CHECKING:
    from pathlib import Path

_OURS = ("ddp", "launcher", "rendezvous")
_NIGHTLY = pytest.mark.nightly
_ALSO_OURS = [
    pytest.param(name, marks=_NIGHTLY) for name in ("launcher", "rendezvous", "wire", "_ddp_launch")
]
_ALSO_TORCHS = [
    pytest.param(name, marks=_NIGHTLY)
    for name in ("numpy/__init__.py", "typing_extensions.py", "json.py", "socket.py")
]
_ALSO_ON_PYTHONPATH = [
    pytest.param(name, marks=_NIGHTLY) for name in ("grpc", "rendezvous", "ddp", "asyncio", "google")
]
_SETS_THREADS = """
import os, sys
assert "torch" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"
import torch
print(torch.get_num_threads())
"""
# A fork has imported ctypes; a new interpreter has not.
_PLAIN_START = "warm start is not possible"


@pytest.mark.parametrize("name", ["ddp", "sitecustomize", *_ALSO_OURS])
def test_script_of_that_name(name: str, light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "import sys, os\nprint(__name__, 'ctypes' in sys.modules)\n", f"{name}.py")
    ended = ddp_launch(f"{name}.py", cwd=tmp_path, env=light).ok()
    assert (ended.out, ended.err) == ("__main__ True\n", "")


@pytest.mark.parametrize("options", [WARM, PLAIN], ids=["warm", "plain"])
def test_modules_and_folders_of_those_names_beside_it(
    options: tuple[str, ...], light: dict[str, str], tmp_path: Path
) -> None:
    for name in _OURS:
        script(tmp_path / name, f"where = '{name} of the script'\n", "__init__.py")
    for name in ("wire", "loop", "rank", "tree", "warm", "_ddp_launch", "sitecustomize"):
        script(tmp_path, f"where = '{name} of the script'\n", f"{name}.py")
    names = "ddp, launcher, rendezvous, wire, loop, rank, tree, warm, _ddp_launch, sitecustomize"
    script(tmp_path, f"import {names}\nfor one in ({names}):\n    print(one.where)\n")
    ended = ddp_launch("train.py", cwd=tmp_path, options=options, env=light).ok()
    assert ended.out == "".join(f"{name} of the script\n" for name in names.split(", "))
    assert ended.err == ""


def test_import_of_our_library_behind_such_a_name_says_why(light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "x = 1\n", "ddp.py")
    script(tmp_path, "from ddp import DistributedDataParallel\n")
    ended = ddp_launch("train.py", cwd=tmp_path, env=light)
    assert ended.code == 1
    assert "ddp.py" in ended.err
    assert "rename it" in ended.err


def test_script_called_ddp_that_imports_our_library_says_why(light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "from ddp import DistributedDataParallel\n", "ddp.py")
    ended = ddp_launch("ddp.py", cwd=tmp_path, env=light)
    assert ended.code == 1
    assert "rename it" in ended.err


@pytest.mark.parametrize("name", ["launcher", *_ALSO_ON_PYTHONPATH])
def test_modules_of_those_names_on_pythonpath(name: str, tmp_path: Path) -> None:
    """The agent and its rendezvous service import their own modules, and the rank imports the user's."""
    folder = tmp_path / "project"
    script(folder, f"import os\nassert 'RANK' in os.environ\nwhere = '{name} of the project'\n", f"{name}.py")
    script(tmp_path, f"import {name}\nprint({name}.where)\n")
    ended = ddp_launch(
        "train.py",
        cwd=tmp_path,
        options=("--nnodes=1:2", "--last-call=0.1s", f"--rdzv-endpoint=localhost:{free_port()}"),
        env={"PYTHONPATH": str(folder)},
    ).ok()
    assert ended.out == f"{name} of the project\n"


@pytest.mark.parametrize("name", ["queue.py", *_ALSO_TORCHS])
def test_a_module_that_torch_imports_is_the_scripts_own(name: str, tmp_path: Path) -> None:
    entry = name.partition("/")[0]
    module = entry.removesuffix(".py")
    place = tmp_path / name
    script(place.parent, f"where = '{name}'\n", place.name)
    script(tmp_path, f"import {module}\nprint({module}.where)\n")
    assert python("train.py", cwd=tmp_path).ok().out == f"{name}\n"
    ended = ddp_launch("train.py", cwd=tmp_path, nproc=2).ok()
    assert ended.out == f"{name}\n" * 2
    assert ended.err.count(_PLAIN_START) == 1
    assert f"{tmp_path / entry} has the same name" in ended.err


_HIDDEN = [
    "logging.py",
    *(pytest.param(n, marks=_NIGHTLY) for n in ("json.py", "numpy/__init__.py", "torch.py")),
]


@pytest.mark.parametrize("name", _HIDDEN)
def test_a_file_that_hides_a_module_from_torch_is_named(name: str, tmp_path: Path) -> None:
    """The frame that raises is in site-packages, where an old library would raise the same exception."""
    place = tmp_path / name
    script(place.parent, "mine = 1\n", place.name)
    script(tmp_path, "import torch, json, numpy\nprint(torch.__version__, json.loads, numpy.ndarray)\n")
    ended = ddp_launch("train.py", cwd=tmp_path, options=("--no-warm-start", "--log-prefix", ""))
    assert ended.code == 1
    hint = " ".join(ended.err.replace("│", " ").split()).partition(" hint ")[2]
    entry = tmp_path / name.partition("/")[0]
    assert "".join(f"{entry} hides".split()) in "".join(hint.split())
    assert "rename it" in hint


def test_a_built_in_module_cannot_be_shadowed(light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "raise RuntimeError('not this one')\n", "atexit.py")
    script(tmp_path, "import atexit, sys\nprint(atexit.__name__, 'ctypes' in sys.modules)\n")
    ended = ddp_launch("train.py", cwd=tmp_path, env=light).ok()
    assert (ended.out, ended.err) == ("atexit True\n", "")


def test_a_safe_path_hides_them(light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "raise RuntimeError('not this one')\n", "queue.py")
    script(
        tmp_path,
        "import queue, sys\nprint(queue.Queue.__name__, sys.flags.safe_path, 'ctypes' in sys.modules)\n",
    )
    ended = ddp_launch("train.py", cwd=tmp_path, env=light | {"PYTHONSAFEPATH": "1"}).ok()
    assert (ended.out, ended.err) == ("Queue True True\n", "")


@pytest.mark.nightly(instead=("core/test_early_variables.py", "core/test_worker_env.py"))
def test_a_script_that_sets_threads_before_the_import_is_heeded(tmp_path: Path) -> None:
    script(tmp_path, _SETS_THREADS)
    ended = ddp_launch("train.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "2"}).ok()
    assert ended.out == "1\n"
    assert ended.err.count(_PLAIN_START) == 1
    assert "OMP_" in ended.err
