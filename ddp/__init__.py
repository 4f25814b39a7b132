"""The library inside a rank: process groups and the gradient reducer.

Names are fetched when they are asked for, so that `import ddp` costs nothing and a script loads what it uses.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp import averaging, comm_hooks, elastic
    from ddp.comm_error import CommError
    from ddp.module import DistributedDataParallel
    from ddp.numerics import NumericsError, check_numerics
    from ddp.place import InitError
    from ddp.process_group import Place, init, shutdown
    from ddp.sections import section, status
    from ddp.sharded_optimizer import ShardedOptimizer
    from ddp.tracing import trace

__all__ = [
    "CommError",
    "DistributedDataParallel",
    "InitError",
    "NumericsError",
    "Place",
    "ShardedOptimizer",
    "averaging",
    "check_numerics",
    "comm_hooks",
    "elastic",
    "init",
    "section",
    "shutdown",
    "status",
    "trace",
]

_MODULES = {"averaging", "comm_hooks", "elastic"}

_FROM = {
    "CommError": "ddp.comm_error",
    "DistributedDataParallel": "ddp.module",
    "InitError": "ddp.place",
    "NumericsError": "ddp.numerics",
    "Place": "ddp.process_group",
    "ShardedOptimizer": "ddp.sharded_optimizer",
    "check_numerics": "ddp.numerics",
    "init": "ddp.process_group",
    "section": "ddp.sections",
    "shutdown": "ddp.process_group",
    "status": "ddp.sections",
    "trace": "ddp.tracing",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return resolve_name(f"ddp.{name}")
    if name not in _FROM:
        raise AttributeError(f"module 'ddp' has no attribute {name!r}")
    return resolve_name(f"{_FROM[name]}:{name}")
