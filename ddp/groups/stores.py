"""Waiting on a store of torch, so that a wait ends when its reason has gone."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def await_keys(store: Any, keys: list[str], timeout_s: float, interrupted: Callable[[], str]) -> None:
    """Wait until the store has all keys. TimeoutError: it does not have them in time.

    `interrupted` returns why the wait must end, or "". The guard ends a wait by cutting the connection to the store:
    asking the store again and again would load it, and torch would print a warning for each wait that expires.
    """
    deadline = time.monotonic() + timeout_s
    if reason := interrupted():  # before this, there may have been no connection to cut
        raise dist.DistBackendError(reason)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if reason := interrupted():
            raise dist.DistBackendError(reason) from error
        if store.check(keys):  # raises if the store is gone
            return
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the store does not have {keys} after {timeout_s:g} s") from error
        raise


def own_store(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
