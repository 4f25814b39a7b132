"""Waiting on a store of torch, so that a wait ends when its reason has gone."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

ASK_EVERY_S = 0.2


def await_keys(store: Any, keys: list[str], timeout_s: float, interrupted: Callable[[], str]) -> None:
    """Wait until the store has all keys. TimeoutError: it does not have them in time.

    `interrupted` is asked several times per second. It returns why the wait must end, or "".
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait(keys, timedelta(seconds=min(left, ASK_EVERY_S)))
        except RuntimeError:
            if store.check(keys):  # raises if the store is gone
                return
        else:
            return
        if reason := interrupted():
            raise dist.DistBackendError(reason)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the store does not have {keys} after {timeout_s:g} s")


def own_store(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
