"""Load the compiled core. If it was not built, log once that all collectives use Gloo."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from ddp.telemetry.contracts import NATIVE

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("ddp")
_warnings: list[str] = []


@functools.cache
def native() -> ModuleType | None:
    if os.environ.get(NATIVE, "1") == "0":
        warn_once("DDP_NATIVE=0 disables the compiled core")
        return None
    try:
        return importlib.import_module("ddp.groups._native")
    except ModuleNotFoundError:
        warn_once(
            "the compiled core is not installed. Install a wheel, or build from source with a C compiler"
        )
        return None
    except ImportError as error:
        warn_once(
            f"cannot load the compiled core ({error}). Reinstall the package with a C compiler to build it"
        )
        return None


def part(name: str) -> ModuleType | None:
    """A compiled part that has a substitute in Python; None without it."""
    try:
        found: ModuleType | None = resolve_name(f"{name}:") if os.environ.get(NATIVE, "1") != "0" else None
    except ImportError:
        return None
    return found


def warn_once(reason: str) -> None:
    """Log a warning once per job, on rank 0."""
    if not _warnings and os.environ.get("RANK", "0") == "0":
        _warnings.append(reason)
        _log.warning("ddp: %s. Collectives use Gloo, which is slower than shared memory", reason)
