"""Tries this project with several releases of torch, and writes docs/compatibility.md.

    python tests/matrix/matrix.py [--uv UV] [--keep] [--limit 240] [--case NAME] [--no-docs] [VERSION[@PYTHON] ...]

Each release gets an environment of its own in .venv-matrix/, where this checkout is installed. It is removed after its
tests, since a build with CUDA takes 5 GB. `oldest` and `newest` are the ends of what is supported. A PYTHON is a number
(3.13), or the path of an interpreter. Without versions, all of docs/compatibility.md are tried again, except those with
a Python that is not installed here: their results stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "compatibility.md"
ROOM = ROOT / ".venv-matrix"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
NEEDED_BYTES = 12 << 30  # a build with CUDA, its archives, and the wheels of NVIDIA
BESIDE_TORCH = ("numpy", "setuptools", "pytest", "pytest-timeout", "hypothesis", "psutil", "packaging")
_END_S = 15.0
_NOT_FOUND = 4  # pytest's exit code then

sys.path[:0] = [str(HERE), str(ROOT)]

from cases import CASES, Case  # noqa: E402
from table import Column, from_json, merged, rendered, results_of, to_json  # noqa: E402

from ddp.telemetry.torch_names import OLDEST  # noqa: E402


class NoInterpreter(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--uv", default=shutil.which("uv") or "uv")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument(
        "--case", action="append", help="only this one, whose result replaces the recorded one"
    )
    parser.add_argument("--no-docs", action="store_true", help="record nothing, and leave the page as it is")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the tests of one release")
    options = parser.parse_args()
    wanted = options.versions or [column.wish for column in recorded()]
    failed = False
    for each in wanted:
        version, _, python = each.partition("@")
        try:
            column = tried(version, python, options)
        except NoInterpreter as error:
            print(f"torch {version} was not tried: {error}", flush=True)
            failed = failed or bool(options.versions)
            continue
        if not options.no_docs:
            columns = merged(recorded(), [column])
            RESULTS.write_text(json.dumps(to_json(columns), indent=1) + "\n")
            write_page(columns)
        print(rendered([column]), flush=True)
        failed = failed or any(result.outcome == "fails" for result in column.results.values())
    return int(failed)


def recorded() -> list[Column]:
    return from_json(json.loads(RESULTS.read_text())) if RESULTS.exists() else []


def tried(version: str, python: str, options: argparse.Namespace) -> Column:
    """Install the release, run its tests, and remove it."""
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        sys.exit(
            f"{free >> 30} GiB are free, and an environment may need {NEEDED_BYTES >> 30} GiB. Free some space"
        )
    name = "-".join(filter(None, (version, python.strip("/").replace("/", "-"))))
    environment = ROOM / name
    own = environment / "bin" / "python"
    try:
        if not own.exists():
            install(options.uv, environment, wanted_torch(version), interpreter(options.uv, python))
        words = ("--no-deps", "--no-build-isolation", "--python", str(own), "--editable", str(ROOT))
        uv(options.uv, "pip", "install", *words)
        return run(own, options.limit, [case for case in CASES if case.name in (options.case or [case.name])])
    finally:
        if not options.keep:
            shutil.rmtree(environment, ignore_errors=True)


def interpreter(command: str, python: str) -> str:
    """Return this one, if it is of the release that is asked for, or another one that is installed."""
    mine = platform.python_version()
    if not python or f"{mine}.".startswith(f"{python}."):
        return sys.executable
    found = subprocess.run(
        [command, "python", "find", "--no-python-downloads", python], capture_output=True, text=True
    )
    if found.returncode:
        raise NoInterpreter(f"Python {python} is not installed here, or not on PATH")
    return found.stdout.strip()


def wanted_torch(version: str) -> str:
    if version == "newest":
        return "torch"
    if version == "oldest":
        return f"torch=={OLDEST[0]}.{OLDEST[1]}.*"
    return f"torch=={version}"


def install(command: str, environment: Path, torch: str, python: str) -> None:
    uv(command, "venv", "--python", python, str(environment))
    own = str(environment / "bin" / "python")
    project = (ROOT / "pyproject.toml").read_text()
    ours = re.search(r"^dependencies = (\[.*\])$", project, re.MULTILINE)
    assert ours is not None
    uv(command, "pip", "install", "--python", own, torch, *BESIDE_TORCH, *json.loads(ours[1]))


def uv(command: str, *words: str) -> None:
    """Archives are kept in the room as well, until its environments are removed."""
    env = os.environ | {"UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(ROOM / "cache"))}
    subprocess.run([command, *words, "--quiet"], check=True, env=env, cwd=ROOT)


def run(python: Path, limit_s: float, cases: list[Case]) -> Column:
    """Run the tests. After the limit those that are left do not run."""
    report = python.parent.parent / "report.xml"
    report.unlink(missing_ok=True)
    tests = [test for case in cases for test in case.tests]
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "--timeout",
        "120",
        "-m",
        "not gpu",
    ]
    env = os.environ | {
        "MATRIX_OTHER_PYTHON": sys.executable,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    began = time.monotonic()
    process = subprocess.Popen([str(python), *words, *tests], cwd=ROOT, env=env)
    is_whole = True
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_whole = False
        process.send_signal(signal.SIGINT)  # pytest ends the test, and writes its report
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode == _NOT_FOUND:
        sys.exit("pytest ran nothing: tests/matrix/cases.py names a test that does not exist")
    took_s = round(time.monotonic() - began)
    asked = "import platform, torch; print(torch.__version__, platform.python_version())"
    torch, version = subprocess.check_output([str(python), "-c", asked], text=True).split()
    return Column(
        torch, version, took_s, results_of(report.read_text() if report.exists() else "", cases, is_whole)
    )


def write_page(columns: list[Column]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{rendered(columns)}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
