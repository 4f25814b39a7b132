"""What is installed from a wheel is whole, and runs where nothing else is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from tidy import PACKAGES, ROOT


def run(*argv, **options):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "_ddp_launch_entry.py"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
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


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler here")
def test_the_compiled_core_is_in_it_for_any_python_from_311_on(wheel):
    assert "-cp311-abi3-" in wheel.name
    assert {"ddp/groups/_native.abi3.so", "ddp/telemetry/_page.abi3.so"} <= set(
        zipfile.ZipFile(wheel).namelist()
    )


def test_without_a_compiler_the_rest_is_installed_all_the_same(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("build", "*.so"))
    environment = {**os.environ, "CC": "/nowhere/cc"}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        copy,
    ]
    run(*command, env=environment)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert "ddp/groups/shm.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_the_source_archive_can_be_compiled(source, tmp_path):
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-W", "ignore", "-c", build, cwd=source)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    there = {f"ddp/groups/_core/{path.name}" for path in (ROOT / "ddp" / "groups" / "_core").iterdir()}
    assert there <= names
