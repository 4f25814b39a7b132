"""The library that each training process imports: process groups and the gradient reducer.

Submodules are imported on first use (lazy import), so `import ddp` is fast.
"""

from __future__ import annotations

import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp import averaging, elastic, integrations
    from ddp.groups.process_group import Place, init, shutdown
    from ddp.groups.rank_info import InitError
    from ddp.last_step import on_failure, resume_path, step_complete
    from ddp.launching.api import launch
    from ddp.launching.errors import LaunchError
    from ddp.reducer.module import DistributedDataParallel
    from ddp.telemetry.comm_error import CommError
    from ddp.telemetry.sections import exclude_node, section, status
    from ddp.telemetry.values import log

if "t" in sys.abiflags:
    raise ImportError(
        f"ddp does not support free-threaded Python, and {sys.executable} is such a build. Use one with the global "
        "interpreter lock, for example python3.14 instead of python3.14t."
    )

__all__ = [
    "CommError",
    "DistributedDataParallel",
    "InitError",
    "LaunchError",
    "NumericsError",
    "Place",
    "averaging",
    "check_numerics",
    "elastic",
    "exclude_node",
    "init",
    "integrations",
    "launch",
    "log",
    "on_failure",
    "resume_path",
    "section",
    "shutdown",
    "status",
    "step_complete",
]

_MODULES = {"averaging", "elastic", "integrations"}

_FROM = {
    "CommError": "ddp.telemetry.comm_error",
    "DistributedDataParallel": "ddp.reducer.module",
    "InitError": "ddp.groups.rank_info",
    "LaunchError": "ddp.launching.errors",
    "Place": "ddp.groups.process_group",
    "exclude_node": "ddp.telemetry.sections",
    "init": "ddp.groups.process_group",
    "launch": "ddp.launching.api",
    "on_failure": "ddp.last_step",
    "resume_path": "ddp.last_step",
    "step_complete": "ddp.last_step",
    "log": "ddp.telemetry.values",
    "section": "ddp.telemetry.sections",
    "shutdown": "ddp.groups.process_group",
    "status": "ddp.telemetry.sections",
}
_OF_WINGS = {"NumericsError", "check_numerics"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return resolve_name(f"ddp.{name}")
    if name in _OF_WINGS:
        from _ddp_launch_entry import LIBRARY, find

        return find(LIBRARY, f"ddp.{name}")
    if name not in _FROM:
        raise AttributeError(f"module 'ddp' has no attribute {name!r}")
    return resolve_name(f"{_FROM[name]}:{name}")
