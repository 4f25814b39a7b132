"""The library inside a rank: process groups and the gradient reducer.

Names are fetched when they are asked for, so that `import ddp` costs nothing and a script loads what it uses.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp import averaging, comm_hooks, elastic
    from ddp.module import DistributedDataParallel
    from ddp.place import InitError
    from ddp.process_group import Place, init, shutdown
    from ddp.sharded_optimizer import ShardedOptimizer
    from ddp.tracing import trace

__all__ = [
    "DistributedDataParallel",
    "InitError",
    "Place",
    "ShardedOptimizer",
    "averaging",
    "comm_hooks",
    "elastic",
    "init",
    "shutdown",
    "trace",
]

_MODULES = {"averaging", "comm_hooks", "elastic"}

_FROM = {
    "DistributedDataParallel": "ddp.module",
    "InitError": "ddp.place",
    "Place": "ddp.process_group",
    "ShardedOptimizer": "ddp.sharded_optimizer",
    "init": "ddp.process_group",
    "shutdown": "ddp.process_group",
    "trace": "ddp.tracing",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return resolve_name(f"ddp.{name}")
    if name not in _FROM:
        raise AttributeError(f"module 'ddp' has no attribute {name!r}")
    return resolve_name(f"{_FROM[name]}:{name}")
