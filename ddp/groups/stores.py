"""Waiting on a store of torch, so that a wait ends when its reason has gone.

`Store.wait` cannot be interrupted, and torch prints warnings each time that such a wait times out. So a wait that
may be interrupted asks the store again and again.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_ASK_AFTER_S = 0.001
_ASK_EVERY_S = 0.05
_SELDOM_S = 0.5


def never() -> str:
    return ""


def await_keys(store: Any, keys: list[str], timeout_s: float, interrupted: Callable[[], str] = never) -> None:
    """Wait until the store has all keys. TimeoutError: it does not have them in time.

    `interrupted` is asked at intervals. It returns why the wait must end, or "".
    """
    if interrupted is never:
        _wait(store, keys, timeout_s)
        return
    began = time.monotonic()
    while not _has(store, keys, interrupted):
        passed = time.monotonic() - began
        if passed >= timeout_s:
            raise TimeoutError(f"the store does not have {keys} after {timeout_s:g} s")
        time.sleep(pause_after(passed))


def pause_after(passed: float) -> float:
    """How long to wait before the store is asked again.

    A member that is a little late is noticed after a tenth more of that time at most. The pauses grow with the wait, so
    that many ranks that wait for long do not keep the store busy.
    """
    return max(_ASK_AFTER_S, min(passed / 10, _ASK_EVERY_S), min(passed / 100, _SELDOM_S))


def _has(store: Any, keys: list[str], interrupted: Callable[[], str]) -> bool:
    error = None
    try:
        found = bool(store.check(keys))
    except RuntimeError as lost:  # the store is gone, or the guard has cut the connection because of a pause
        found, error = False, lost
    if reason := interrupted():
        raise dist.DistBackendError(reason) from error
    if error is not None:
        raise error
    return found


def _wait(store: Any, keys: list[str], timeout_s: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if not store.check(keys):  # raises if the store is gone
            raise TimeoutError(f"the store does not have {keys} after {timeout_s:g} s") from error


def own_store(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
