"""The sets of instructions that the core is compiled for: each gives the same bits, and the best one is used."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tidy import ROOT

from ddp.groups.core_loading import native

CORE = ROOT / "ddp" / "groups" / "_core"
SOURCE = Path(__file__).parent / "kernel_sets.c"
FLAGS = {"avx512": "avx512vl", "avx2": "avx2"}  # as the kernel names them in /proc/cpuinfo


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
def test_all_sets_give_the_same_bits(tmp_path):
    program = tmp_path / "sets"
    flags = ["-std=gnu11", "-O3", "-fwrapv", "-ffp-contract=off", f"-I{CORE}"]
    subprocess.run(["gcc", *flags, "-o", program, SOURCE, CORE / "kernels.c"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(native() is None, reason="the core is not compiled")
def test_the_best_that_this_cpu_has_is_used():
    cpu = Path("/proc/cpuinfo").read_text().split()
    found = [name for name, flag in FLAGS.items() if flag in cpu]
    assert native().kernels() == (found or [{"aarch64": "neon"}.get(os.uname().machine, "plain")])[0]
    with pytest.raises(ValueError, match="mmx"):
        native().kernels("mmx")
