"""Puts `entry.run` in the place of `torch.distributed.run.run` when that module is imported. Imported by a .pth file.

Ranks keep torch's, so that an interpreter of a rank is as under torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

_MODULE = "torch.distributed.run"
_AS_PROGRAM = """
import sys
from _ddp_launch_entry import ddp_launch
sys.argv[1:1] = ["--as-torchrun"]
sys.exit(ddp_launch())
"""


class RunFinder:
    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # also, so that `find_spec` below does not come here again
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, torchs: object) -> None:
        self._torchs = torchs

    def __getattr__(self, name: str) -> object:
        return getattr(self._torchs, name)

    def exec_module(self, module: ModuleType) -> None:
        self._torchs.exec_module(module)  # type: ignore[attr-defined]

        def run(args: object) -> None:
            from ddp_launch_wings.callers import entry

            entry.run(args)  # type: ignore[arg-type]

        module.run = run  # type: ignore[attr-defined]

    def get_code(self, _name: str) -> CodeType:
        """`python -m torch.distributed.run` asks for it."""
        return compile(_AS_PROGRAM, "<ddp-launch>", "exec")


def install() -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.meta_path.insert(0, RunFinder())


install()
