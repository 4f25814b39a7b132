"""Machines without torch import `ddp.elastic`: builds of wheels, and tools that read the names of commits."""

from __future__ import annotations

import subprocess
import sys

BARE = """
import runpy, sys
sys.modules["torch"] = None  # its import fails
import ddp.elastic
from ddp.elastic import checkpoint_request, checkpoint_requested, commits
from ddp.elastic.files import folders
assert checkpoint_requested() is False and checkpoint_request() is None
try:
    ddp.elastic.State
except ImportError:
    pass
else:
    raise AssertionError("State needs torch")
assert not hasattr(ddp.elastic, "Stat")
sys.argv = ["ddp.elastic", "--help"]
runpy.run_module("ddp.elastic", run_name="__main__")
"""


def test_the_package_and_its_help_need_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "list the commits" in done.stdout


def test_a_process_that_has_torch_imports_all_at_once_for_its_forks() -> None:
    program = (
        "import torch, sys, ddp.elastic as e; assert 'ddp.elastic.state' in sys.modules; "
        "assert not [n for n in e.__all__ if getattr(e, n).__name__ != n]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
