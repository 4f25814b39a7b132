"""The compiled core, where it was built; elsewhere one line says that everything goes over Gloo."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("ddp")
_announced: list[str] = []


@functools.cache
def native() -> ModuleType | None:
    if os.environ.get("DDP_NATIVE", "1") == "0":
        announce("the compiled core is switched off (DDP_NATIVE=0)")
        return None
    try:
        return importlib.import_module("ddp.groups._native")
    except ImportError as error:
        announce(f"the compiled core is not there ({error})")
        return None


def announce(reason: str) -> None:
    """Once in a job: the first rank speaks for all."""
    if not _announced and os.environ.get("RANK", "0") == "0":
        _announced.append(reason)
        _log.warning("ddp: %s: shared memory is not used, collectives go over Gloo", reason)
