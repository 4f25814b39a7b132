"""What is installed from a wheel is whole, and runs where nothing else is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from tidy import ROOT

sys.path.append(str(ROOT / "deploy" / "wheels"))

import contents
import manylinux

NIGHTLY = pytest.mark.nightly(
    instead=("::test_it_runs_where_nothing_else_is_installed", "core/test_wheels.py")
)


def run(*argv, **options):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


needs_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler here"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    names = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    for name in (*names, contents.ENTRY):
        shutil.copy(ROOT / name, source)
    for name in contents.PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns("img", "decisions"))
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    return next(folder.glob("*.whl"))


def test_it_has_what_it_should_and_nothing_else(wheel):
    """Modules, pages, the licence, metadata; no C sources, no tests."""
    assert contents.problems_of_wheel(wheel) == []
    there = set(zipfile.ZipFile(wheel).namelist())
    assert {"launcher/template/hook/sitecustomize.py", "launcher/pages/hangs.md"} <= there


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


@pytest.mark.nightly(instead="::test_it_has_what_it_should_and_nothing_else")
def test_make_wheel(tmp_path):
    """The first command of the README: one wheel, in seconds, and nothing that is left in the checkout."""
    run("git", "clone", "-q", ROOT, tmp_path / "checkout")
    run("make", "wheel", f"PYTHON={sys.executable}", cwd=tmp_path / "checkout")
    (wheel,) = (tmp_path / "checkout" / "dist").glob("*.whl")
    assert contents.problems_of_wheel(wheel) == []
    assert run("git", "status", "--porcelain", cwd=tmp_path / "checkout") == ""


@needs_a_compiler
def test_a_released_wheel_needs_no_newer_glibc_than_its_tag_says():
    """glibc 2.34 moved functions of threads: a wheel that takes one in its newest version is for new systems only."""
    bound = re.findall(r"^BIND\((\w+),", (ROOT / "deploy/wheels/old_glibc.h").read_text(), re.MULTILINE)
    modules = [*(ROOT / "ddp").rglob("*.so"), *(ROOT / "ddp_launch_wings").rglob("*.so")]
    assert {name for each in modules for name in manylinux.moved_symbols(each)} <= set(bound)


def test_the_compiled_core_is_in_it_for_any_python_from_311_on(wheel):
    assert "-cp311-abi3-" in wheel.name


def wheel_of(source, folder, **environment):
    copy = shutil.copytree(source, folder / "copy", ignore=shutil.ignore_patterns("build", "*.so"))
    words = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, copy]
    run(sys.executable, *words, env=os.environ | environment)
    return next(folder.glob("*.whl"))


def test_without_a_compiler_the_rest_is_installed_and_says_what_is_missing(source, tmp_path):
    archive = zipfile.ZipFile(wheel_of(source, tmp_path, CC="/nowhere/cc"))
    assert "ddp/groups/shm.py" in archive.namelist()
    assert not [name for name in archive.namelist() if name.endswith(".so")]
    archive.extractall(tmp_path / "installed")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["PYTHONPATH"] = str(tmp_path / "installed")

    def asked(*words):
        return run(sys.executable, *words, cwd=tmp_path, env=environ)

    assert "\ncore not compiled" in asked("-m", "launcher", "--version")
    assert str(tmp_path) in asked("-m", "launcher", "docs")
    assert asked("-m", "launcher", "docs", "hangs") == (ROOT / "docs/hangs.md").read_text()
    ask = "from ddp.groups.core_loading import native; print(native())"
    assert asked("-c", f"import logging; logging.basicConfig(filename='said'); {ask}") == "None\n"
    assert (tmp_path / "said").read_text().count("Gloo") == 1


@pytest.mark.nightly(instead="::test_without_a_compiler_the_rest_is_installed_and_says_what_is_missing")
def test_a_wheel_for_all_machines_needs_no_compiler_and_says_so(source, tmp_path):
    made = wheel_of(source, tmp_path, DDP_LAUNCH_CORE="0", CC="/nowhere/cc")
    assert made.name.endswith("-py3-none-any.whl")
    assert contents.problems_of_wheel(made) == []


@pytest.mark.nightly(instead="::test_without_a_compiler_the_rest_is_installed_and_says_what_is_missing")
def test_a_core_that_is_required_and_cannot_be_compiled_is_an_error(source, tmp_path):
    with pytest.raises(AssertionError, match="nowhere"):
        wheel_of(source, tmp_path, DDP_LAUNCH_CORE="required", CC="/nowhere/cc")


@pytest.mark.nightly(instead="::test_without_a_compiler_the_rest_is_installed_and_says_what_is_missing")
def test_the_source_archive_can_be_compiled(source, tmp_path):
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-W", "ignore", "-c", build, cwd=source)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    there = {f"ddp/groups/_core/{path.name}" for path in (ROOT / "ddp" / "groups" / "_core").iterdir()}
    assert there <= names
    assert contents.problems_of_sources(next(tmp_path.glob("*.tar.gz"))) == []


def by_uv(folder, wheel):
    run("make", "-s", "tools", cwd=ROOT)
    uv = ROOT / ".venv-tools/bin/uv"
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "env")
    run(uv, "pip", "install", "--quiet", "--python", folder / "env/bin/python", wheel)
    return folder / "env/bin"


def by_pipx(folder, wheel):
    run(sys.executable, "-m", "venv", folder / "tools")
    run(folder / "tools/bin/python", "-m", "pip", "-q", "install", "pipx")
    own = {"PIPX_HOME": str(folder / "homes"), "PIPX_BIN_DIR": str(folder / "bin")}
    run(folder / "tools/bin/pipx", "install", "--quiet", wheel, env=os.environ | own)
    return folder / "bin"


def by_pip_over_the_systems_packages(folder, wheel):
    run(sys.executable, "-m", "venv", "--system-site-packages", folder / "env")
    run(folder / "env/bin/python", "-m", "pip", "-q", "install", wheel)
    return folder / "env/bin"


@NIGHTLY
@pytest.mark.parametrize("install", [by_uv, by_pipx, by_pip_over_the_systems_packages])
def test_installers_of_other_kinds(install, wheel, tmp_path):
    """With what it needs from the index; the ranks use no torch."""
    command = install(tmp_path, wheel) / "ddp-launch"
    (tmp_path / "script.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    assert "rank 1" in run(command, "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert "core compiled" in run(command, "--version", cwd=tmp_path)


@NIGHTLY
@pytest.mark.timeout(1200)
@needs_a_compiler
def test_what_is_released_is_installed_and_runs():
    """Two builds that agree, and jobs from each archive in an empty environment: see deploy/wheels."""
    run(sys.executable, ROOT / "deploy/wheels/build.py", cwd=ROOT)
    for elsewhere in ("old_system", "arm64"):
        run(sys.executable, ROOT / f"deploy/wheels/{elsewhere}.py", cwd=ROOT)
    said = run(sys.executable, ROOT / "deploy/wheels/try_out.py", cwd=ROOT)
    assert said.count("a job, two nodes, torchrun") == 3
