"""Part `tests`: the tests that are marked `gpu`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import gpu_part

_NEEDED = ("pytest", "pytest_timeout", "hypothesis")


def main() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        gpu_part.not_run(f"{sys.executable} does not have {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", "--timeout", "100"]
        words += ["-W", "default"]  # of plug-ins that are installed there
        command = [sys.executable, "-m", "pytest", *words, os.path.join(gpu_part.ROOT, "tests", "gpu")]
        code = subprocess.run(command, cwd=gpu_part.ROOT, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        wrong = [each.get("message", "") for kind in ("failure", "error") for each in case.findall(kind)]
        skipped = [each.get("message", "") for each in case.findall("skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        gpu_part.found("check", name=name, ok=not wrong, detail=" ".join(wrong or skipped)[:500])
    if code not in (0, 1):  # pytest itself did not come to its end
        sys.exit(code)


if __name__ == "__main__":
    main()
