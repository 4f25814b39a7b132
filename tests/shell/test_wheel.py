"""What is installed from a wheel is whole, and runs where nothing else is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest
from tidy import PACKAGES, ROOT


def run(*argv, **options):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    return next(folder.glob("*.whl"))


def test_every_module_is_in_it(wheel):
    there = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert "launcher/template/hook/sitecustomize.py" in ours
    assert ours <= there
    assert {f"{name}/py.typed" for name in PACKAGES} <= there
    assert not [name for name in there if name.startswith(("tests", "bench", "examples", "docs"))]


def test_it_runs_where_nothing_else_is_installed(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel)
    command = tmp_path / "env" / "bin" / "ddp-launch"
    assert run(command, "--nproc-per-node", "1", "--no-python", "echo", "hello", cwd=tmp_path).endswith(
        ":0] hello\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    assert "rank 1" in run(command, "--nproc-per-node", "2", script, cwd=tmp_path)
