"""Our commands find their own modules in front of those of PYTHONPATH; modules of ranks are found as a rank does."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from _ddp_launch_entry import _with_dependencies, reordered
from launcher.settings.import_path import files_that_hide, import_path
from launcher.settings.spec import EntryKind, EntryPoint
from launcher.template import script_start

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
