"""Which scripts set variables that torch reads when it is imported, themselves or in modules of their own folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from _ddp_launch_entry import _with_dependencies, reordered
from launcher.ranks.zygote import early_variable
from launcher.settings.import_path import files_that_hide, import_path
from launcher.settings.spec import EntryKind, EntryPoint
from launcher.template import script_start

if TYPE_CHECKING:
    from pathlib import Path


_SETS = "import os\nos.environ['TORCH_LOGS'] = '+dynamo'\n"
_NAME = "TORCH_LOGS"


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"train.py": _SETS}, _NAME),
        ({"train.py": "import torch\n"}, ""),
        ({"train.py": "import envs\nimport torch\n", "envs.py": _SETS}, _NAME),
        ({"train.py": "import torch, envs as e\n", "envs.py": _SETS}, _NAME),
        ({"train.py": "from conf import env\n", "conf/env.py": _SETS}, _NAME),
        ({"train.py": "from conf.env import A\n", "conf/env.py": "from . import b\n", "conf/b.py": _SETS}, _NAME),
        ({"train.py": "import other\n", "other.py": "import train\n"}, ""),
        ({"train.py": "import torch\n", "unused.py": _SETS}, ""),
        ({"train.py": "import os\nprint(os.environ.get('HOME'))\n"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_script(tmp_path: Path, files: dict[str, str], found: str) -> None:
    _write(tmp_path, files)
    assert early_variable(EntryPoint(EntryKind.SCRIPT, str(tmp_path / "train.py"), ())) == found


@pytest.mark.parametrize(
    "files",
    [
        {"pkg/__init__.py": "", "pkg/train.py": "from . import envs\n", "pkg/envs.py": _SETS},
        {"pkg/__init__.py": _SETS, "pkg/train.py": ""},
        {"pkg/train/__main__.py": _SETS, "pkg/train/__init__.py": ""},
    ],
)
def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    _write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    assert early_variable(EntryPoint(EntryKind.MODULE, "pkg.train", ())) == _NAME


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("print(os.environ.get('OMP_NUM_THREADS'))", False),
        ("n = os.environ['OMP_NUM_THREADS']; m = os.getenv('OMP_NUM_THREADS', '1')", False),
        ("if 'OMP_NUM_THREADS' not in os.environ: raise SystemExit(1)", False),
        ("assert os.environ['OMP_NUM_THREADS'] == '1'", False),
        ("os.environ['OMP_NUM_THREADS'] = '1'", True),
        ("os.environ.setdefault('OMP_NUM_THREADS', '1')", True),
        ("del os.environ['OMP_NUM_THREADS']", True),
        ("os.environ['OMP_NUM_THREADS'] += ',1'", True),
        ("os.environ['OMP_NUM_THREADS'], x = '1', 2", True),
        ("os.environ.update({'OMP_NUM_THREADS': '1'})", True),
        ("if 'OMP_NUM_THREADS' not in os.environ: os.environ['OMP_NUM_THREADS'] = '1'", True),
    ],
)
def test_a_script_that_only_reads_a_variable_does_not_set_it(tmp_path: Path, line: str, sets: bool) -> None:
    _write(tmp_path, {"train.py": f"import os\n{line}\n"})
    found = early_variable(EntryPoint(EntryKind.SCRIPT, str(tmp_path / "train.py"), ()))
    assert found == ("OMP_*" if sets else "")


@pytest.mark.parametrize(
    "name", ["PYTORCH_CUDA_ALLOC_CONF", "ONEDNN_DEFAULT_FPMATH_MODE", "PYTORCH_JIT", "TORCH_COMPILE_DEBUG"]
)
def test_it_finds_variables_that_torch_reads_at_its_import(tmp_path: Path, name: str) -> None:
    _write(tmp_path, {"train.py": f"import os\nos.environ['{name}'] = '1'\n"})
    assert early_variable(EntryPoint(EntryKind.SCRIPT, str(tmp_path / "train.py"), ()))


def test_a_program_is_not_searched() -> None:
    assert early_variable(EntryPoint(EntryKind.PROGRAM, "/bin/true", ())) == ""


# --- Our commands find their own modules in front of those of PYTHONPATH; modules of ranks are found as a rank does


ZIP, LIBRARY, DYNLOAD = "/usr/lib/python312.zip", "/usr/lib/python3.12", "/usr/lib/python3.12/lib-dynload"
SITE = "/venv/lib/python3.12/site-packages"


@pytest.mark.parametrize("ours", [SITE, "/checkout", "/deps"])
def test_folders_of_the_user_come_last(ours: str) -> None:
    path = ["/venv/bin", "/project", "/deps", ZIP, LIBRARY, DYNLOAD, SITE]
    found = reordered(path, LIBRARY, ours)
    assert found[:4] == [ZIP, LIBRARY, DYNLOAD, ours]
    assert found[-2:] == ["/venv/bin", "/project"] if ours == "/deps" else found[-3:] == path[:3]
    assert set(found) == {*path, ours}
    assert len(found) == len(set(found))


def test_a_path_without_a_library_keeps_its_order() -> None:
    assert reordered(["/a", "/b"], LIBRARY, "/b") == ["/b", "/a"]


def test_this_interpreters_library_is_known() -> None:
    found = reordered(["/project", *sys.path], os.path.dirname(os.__file__), "/ours")
    assert found.index(os.path.dirname(os.__file__)) < found.index("/ours") < found.index("/project")


def test_a_rank_searches_pythonpath_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [LIBRARY, SITE, "/venv/bin", "/project"])
    assert import_path({"PYTHONPATH": "/project::/new"}) == ["/project", "/new", LIBRARY, SITE, "/venv/bin"]
    assert import_path({}) == sys.path


def test_a_google_of_the_user_does_not_hide_protobuf(tmp_path: Path) -> None:
    """`google` is a namespace: a file of that name in any folder of the path would take its place."""
    (tmp_path / "google.py").write_text("")
    ask = "import _ddp_launch_entry as e; e._put_users_folders_last(); import google.protobuf.message, sys; "
    ask += "print(sys.path[-1])"
    given = os.environ | {"PYTHONPATH": str(tmp_path)}
    asked = [sys.executable, "-P", "-c", ask]
    done = subprocess.run(asked, env=given, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(tmp_path), done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("grpc", "grpcio is not installed"),
        ("google.protobuf.message", "protobuf is not installed"),
        ("torch", ""),
    ],
)
def test_a_dependency_that_is_missing_is_one_line(
    name: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name.partition(".")[0], raising=False)

    def main() -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    if says:
        assert _with_dependencies("ddpctl", main) == 2
        assert capsys.readouterr().err.startswith(f"ddpctl: error: {says} (No module named {name!r}). Run: ")
    else:
        with pytest.raises(ModuleNotFoundError):
            _with_dependencies("ddpctl", main)


def test_a_dependency_that_a_file_hides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = ModuleType("google")
    users.__file__ = "/project/google.py"
    monkeypatch.setitem(sys.modules, "google", users)

    def main() -> int:
        raise ModuleNotFoundError("'google' is not a package", name="google.protobuf")

    assert _with_dependencies("ddpctl", main) == 2
    assert "/project/google.py hides the package google" in capsys.readouterr().err


def test_the_library_refuses_a_free_threaded_python() -> None:
    asked = [sys.executable, "-c", "import sys; sys.abiflags = 't'; import ddp"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert "ImportError: ddp does not support free-threaded Python" in done.stderr


def test_a_free_threaded_rank_loads_nothing_compiled_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert script_start.load() is not script_start._nothing
    monkeypatch.setattr(sys, "abiflags", "t")
    assert script_start.load() is script_start._nothing


def test_files_of_the_user_that_hide_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = (
        "project/train.py",
        "project/json.py",
        "project/utils.py",
        "project/atexit.py",
        "project/installed/__init__.py",
        "project/logging/notes.txt",
        "more/queue.py",
        "env/site-packages/installed/__init__.py",
        "env/site-packages/token.py",
    )
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys, "path", [LIBRARY, str(tmp_path / "env/site-packages")])
    names = ("json", "utils", "atexit", "installed", "logging", "queue", "token", "absent")
    entry = EntryPoint(EntryKind.SCRIPT, "project/train.py")
    environ = {"PYTHONPATH": f"{tmp_path}/more:{tmp_path}/env/site-packages"}
    project = tmp_path / "project"
    found = {"json": f"{project}/json.py", "installed": f"{project}/installed"}
    assert files_that_hide(names, entry, environ) == found | {"queue": f"{tmp_path}/more/queue.py"}
    assert files_that_hide(names, entry, {}) == found
    assert files_that_hide(names, entry, {"PYTHONSAFEPATH": "1"}) == {}
