"""The core in C, built with the compiler's sanitizers, in a storm of operations."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from tidy import ROOT

CORE = ROOT / "ddp" / "groups" / "_core"
SOURCES = [CORE / f"{name}.c" for name in ("collectives", "kernels", "queue", "ring", "segment")]
STORM = ROOT / "tests" / "ddp_backends" / "storm.c"


@pytest.mark.nightly(instead="ddp_backends/test_collectives.py")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_storm(sanitizer, tmp_path):
    program = tmp_path / "storm"
    command = [
        "gcc",
        "-std=gnu11",
        "-O1",
        "-g",
        "-fwrapv",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
    ]
    command += [f"-I{CORE}", "-o", program, STORM, *SOURCES, "-pthread"]
    subprocess.run([str(word) for word in command], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
