"""The States that are open in this process, and what becomes of their memory when they are left."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from ddp.elastic import scratch
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from ddp.elastic.keeper import Keeper
    from ddp.elastic.state import State

_open: weakref.ref[State] | None = None


def only_one(state: State) -> None:
    """Raise if this process has another open State: two of them would overwrite each other's commits."""
    global _open
    other = None if _open is None else _open()
    if other is not None and other is not state and other.is_open:
        raise WrongUse(
            "this process already has a State. Put all objects into one State, or close() the other one first"
        )
    _open = weakref.ref(state)


def leave(keeper: Keeper, pid: int) -> None:
    """Keep memory for the next generation if a launcher can start one, else remove it. Forked children do nothing."""
    if os.getpid() != pid:
        return
    try:
        keeper.leave()
    finally:
        if not scratch.is_launched(os.environ):
            keeper.remove()
