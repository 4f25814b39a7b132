"""Whether the compiled parts of `ddp` are installed and can be loaded. `ddp` itself is not imported."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_PARTS = ("ddp.groups._native", "ddp.telemetry._page")
NOT_COMPILED = "not compiled"


def state() -> str:
    """Return `compiled`, `NOT_COMPILED`, or why it cannot be loaded."""
    try:
        for name in _PARTS:
            _load(name)
    except FileNotFoundError:
        return NOT_COMPILED
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return "compiled"


def kernels() -> str:
    """The instructions that the core computes with, for example avx512. Call it only if the core is compiled."""
    return str(_load(_PARTS[0]).kernels())


def _load(name: str) -> ModuleType:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    base = os.path.join(root, *name.split("."))
    path = next((base + suffix for suffix in EXTENSION_SUFFIXES if os.path.exists(base + suffix)), "")
    if not path:
        raise FileNotFoundError(base)
    # Under its last name, without its package: `import ddp` later loads it as usual.
    loader = ExtensionFileLoader(name.rpartition(".")[2], path)
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    return module_from_spec(spec)
