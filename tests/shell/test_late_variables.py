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
_AS_IN_A_NEW_INTERPRETER = """
import importlib.util as u, sys
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
assert u.find_spec("torch").submodule_search_locations is not None and "torch" not in sys.modules
assert u.find_spec("torch").loader.get_source("torch")
"""
_IN_A_CHILD = "import installed, os\nif os.fork() == 0:\n    import torch\n    os._exit(0)\nos.wait()\n"


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        (_SETS, "import installed, json, torch\n", "OMP_NUM_THREADS"),
        pytest.param(
            _SETS,
            "import installed\nfrom torch.distributed import TCPStore\n",
            "OMP_NUM_THREADS",
            marks=pytest.mark.nightly,
        ),
        (_SETS, _IN_A_CHILD, "OMP_NUM_THREADS"),
        pytest.param(_UNSETS, "import installed, torch\n", "TORCH_READ_BY_IT", marks=pytest.mark.nightly),
        (_SETS, "import torch, installed\nimport torch.distributed\n", ""),
        pytest.param(_SETS, "import installed\n", "", marks=pytest.mark.nightly),
        (_INNOCENT, "import installed, torch\n", ""),
    ],
)
def test_it_is_said_once(launch: Launch, tmp_path: Path, module: str, source: str, named: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/installed.py").write_text(module)
    env = {"PYTHONPATH": str(tmp_path / "site"), "TORCH_READ_BY_IT": "1"}
    job = launch(
        "--nproc-per-node", "2", source=_AS_IN_A_NEW_INTERPRETER + source, env=env, fake_torch=_TORCH
    )
    assert job.wait() == 0, job.stderr()
    lines = [line for line in job.stderr().splitlines() if "first import of torch" in line]
    assert len(lines) == bool(named), job.stderr()
    if named:
        assert f"warning: {named}: {tmp_path}/site/installed.py sets" in lines[0]
        assert "--no-warm-start" in lines[0]


# Each case runs in a fork of a rank that has not imported torch.
_CASES = """
import ctypes, importlib, importlib.util, os, pickle, sys, threading
from unittest import mock

def threads():
    names = ["torch.nn", "torch.utils.data", "torch", "torch.optim", "torch.fx"] * 3
    together, found = threading.Barrier(len(names)), []
    def go(name):
        together.wait()
        found.append((name, importlib.import_module(name)))
    sys.setswitchinterval(1e-6)
    running = [threading.Thread(target=go, args=(name,)) for name in names]
    for each in running: each.start()
    for each in running: each.join()
    assert len(found) == len(names) and all(each is sys.modules[name] for name, each in found)

def a_part():
    import torch.nn.functional as part
    assert part is sys.modules["torch.nn.functional"] is torch_itself().nn.functional

def a_pickle():
    assert pickle.loads(b"ctorch.nn.modules.linear\\nLinear\\n.") is torch_itself().nn.Linear

def native_code():
    load = ctypes.pythonapi.PyImport_ImportModule
    load.restype = ctypes.py_object
    assert load(b"torch.nn") is torch_itself().nn

def a_stand_in():
    sys.modules["torch"] = stand_in = mock.MagicMock()
    import torch
    assert torch is stand_in
    del sys.modules["torch"]
    assert torch_itself() is not stand_in

def a_lazy_loader():
    spec = importlib.util.find_spec("torch")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules["torch"] = lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    assert lazy.ones(2).sum() == 2 and torch_itself() is lazy

def a_hook():
    class Hook:
        asked = seen = False
        def find_spec(self, name, path=None, target=None):
            if name != "torch" or self.asked: return None
            self.asked = True
            spec = importlib.util.find_spec(name)
            load = spec.loader
            class Chained:
                create_module = staticmethod(load.create_module)
                def exec_module(_, module):
                    load.exec_module(module)
                    self.seen = True
            spec.loader = Chained()
            return spec
    hook = Hook()
    sys.meta_path.insert(0, hook)
    assert torch_itself() and hook.seen

def a_level_of_debugging():
    os.environ["TORCH_" + "DISTRIBUTED_DEBUG"] = "DETAIL"
    torch_itself()
    from torch.distributed import DebugLevel, get_debug_level
    assert get_debug_level() == DebugLevel.DETAIL

def torch_itself():
    import torch
    assert torch.__spec__.loader is torch.__loader__ and not torch.__spec__._initializing
    assert importlib.util.find_spec("torch") is torch.__spec__
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
    return torch

for case in (threads, a_part, a_pickle, native_code, a_stand_in, a_lazy_loader, a_hook, a_level_of_debugging):
    assert "torch" not in sys.modules
    if (pid := os.fork()) == 0:
        case()
        print(case.__name__, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_torch_comes_from_the_template_however_it_is_imported(launch: Launch) -> None:
    job = launch("--nproc-per-node", "1", source=_CASES, fake_torch=None)
    assert job.wait() == 0, job.stderr()
    names = "threads a_part a_pickle native_code a_stand_in a_lazy_loader a_hook a_level_of_debugging".split()
    assert [line.split()[-1] for line in job.stdout().splitlines()] == names, job.stderr()
