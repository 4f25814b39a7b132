"""The files that belong to a script: which they are, whether they can be compiled, and copies of them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from launcher.ranks import editions

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import os, helper as h, json
from models.net import Net
def late():
    import importlib
    return importlib.import_module("plugins.one")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "train.py": SCRIPT,
        "helper.py": "import deeper\nWORD = deeper.WORD",
        "deeper.py": "WORD = 'one'",
        "unused.py": "this is no Python",
        "models/net.py": "from .parts import part\nclass Net: pass",
        "models/parts.py": "part = 1",
        "models/weights.bin": "1234",
        "models/__pycache__/net.pyc": "old",
        "plugins/one.py": "",
        "data.txt": "some data",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_script_and_what_it_imports_from_its_folder_belong_to_it(folder: Path) -> None:
    found = editions.read(str(folder / "train.py"))
    assert set(found.contents) == {
        *("train.py", "helper.py", "deeper.py", "models/net.py", "models/parts.py", "plugins/one.py"),
    }
    assert not found.left_out


def test_what_has_changed(folder: Path) -> None:
    before = editions.read(str(folder / "train.py"))
    assert before.changed_since(before) == []
    (folder / "deeper.py").write_text("WORD = 'two'")
    (folder / "models" / "more.py").write_text("")
    (folder / "plugins" / "one.py").unlink()
    after = editions.read(str(folder / "train.py"))
    assert after.changed_since(before) == ["deeper.py", "models/more.py", "plugins/one.py"]
    assert after.checksum != before.checksum


def test_a_script_that_is_gone_is_named(folder: Path) -> None:
    with pytest.raises(editions.ScriptUnreadable, match=r"cannot read .*gone\.py: No such file"):
        editions.read(str(folder / "gone.py"))


def test_too_many_files_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editions, "_MOST_FILES", 3)
    assert "has more than 3 files" in editions.read(str(folder / "train.py")).left_out


@pytest.mark.parametrize("python", ["", "other"])
@pytest.mark.parametrize(
    ("name", "text", "line", "error"),
    [
        ("train.py", "def f(:\n  pass", 1, "SyntaxError"),
        ("models/parts.py", "x = 1\n  y = 2", 2, "IndentationError"),
    ],
)
def test_a_file_that_cannot_be_compiled_is_named_with_its_line(
    folder: Path, name: str, text: str, line: int, error: str, python: str
) -> None:
    before = editions.read(str(folder / "train.py"))
    assert editions.problem_of(before, []) == ""
    (folder / name).write_text(text)
    after = editions.read(str(folder / "train.py"))
    other = folder / "python"
    other.symlink_to(sys.executable)
    found = editions.problem_of(after, after.changed_since(before), str(other) if python else "")
    assert name in found
    assert f"line {line}" in found
    assert error in found


def test_an_unchanged_file_that_cannot_be_compiled_is_no_obstacle(folder: Path) -> None:
    """A folder may have files that are never imported."""
    (folder / "models" / "template.py").write_text("class {{ name }}: pass")
    found = editions.read(str(folder / "train.py"))
    assert editions.problem_of(found, ["helper.py"]) == ""


def test_an_interpreter_that_is_not_there_is_named(folder: Path) -> None:
    found = editions.read(str(folder / "train.py"))
    assert "/no/python cannot compile the script" in editions.problem_of(found, [], "/no/python")


def test_copies_run_beside_links_to_all_else(folder: Path, tmp_path: Path) -> None:
    kept = editions.read(str(folder / "train.py"))
    (folder / "deeper.py").write_text("WORD = 'two'")
    (folder / "train.py").write_text("broken(")
    script = editions.write(kept, str(tmp_path / "copies"))
    program = (
        f"import sys, runpy; sys.path[0] = {str(tmp_path / 'copies')!r}; import helper; print(helper.WORD)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "one"
    copies = tmp_path / "copies"
    assert script == str(copies / "train.py")
    assert (copies / "train.py").read_text() == SCRIPT
    assert (copies / "data.txt").read_text() == "some data"
    assert (copies / "data.txt").is_symlink()
    assert (copies / "models" / "weights.bin").is_symlink()
    assert not (copies / "models" / "__pycache__").exists()
    assert (folder / "train.py").read_text() == "broken("
