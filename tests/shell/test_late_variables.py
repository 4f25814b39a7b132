"""A variable that an installed module sets before it imports torch has no effect in a warm rank. A line says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

_TORCH = "import os, torch.distributed\nREAD = os.environ.get('TORCH_READ_BY_IT')\n"
_SETS = "import os\nos.environ['OMP_NUM_THREADS'] = '7'\n"
_UNSETS = "import os\nos.environ.pop('TORCH_READ_BY_IT')\n"
_INNOCENT = """
import os
os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['ANY'] = '0'
os.environ['OMP_NUM_THREADS'] = '1'
"""
_NOTHING_REMAINS = """
from importlib.machinery import ModuleSpec
assert "torch" not in globals() or not hasattr(ModuleSpec, "_initializing")
"""
_IN_A_CHILD = "import installed, os\nif os.fork() == 0:\n    import torch\n    os._exit(0)\nos.wait()\n"


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        (_SETS, "import installed, json, torch\n", "OMP_NUM_THREADS"),
        (_SETS, "import installed\nfrom torch.distributed import TCPStore\n", "OMP_NUM_THREADS"),
        (_SETS, _IN_A_CHILD, "OMP_NUM_THREADS"),
        (_UNSETS, "import installed, torch\n", "TORCH_READ_BY_IT"),
        (_SETS, "import torch, installed\nimport torch.distributed\n", ""),
        (_SETS, "import installed\n", ""),
        (_INNOCENT, "import installed, torch\n", ""),
    ],
)
def test_it_is_said_once(launch: Launch, tmp_path: Path, module: str, source: str, named: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/installed.py").write_text(module)
    env = {"PYTHONPATH": str(tmp_path / "site"), "TORCH_READ_BY_IT": "1"}
    job = launch("--nproc-per-node", "2", source=source + _NOTHING_REMAINS, env=env, fake_torch=_TORCH)
    assert job.wait() == 0, job.stderr()
    lines = [line for line in job.stderr().splitlines() if "first import of torch" in line]
    assert len(lines) == bool(named), job.stderr()
    if named:
        assert f"warning: {named}: {tmp_path}/site/installed.py sets" in lines[0]
        assert "--no-warm-start" in lines[0]
