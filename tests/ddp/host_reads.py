"""Counts how often this process makes the host read a tensor. On an accelerator each such read waits for the device.

Functions of Python are counted in all threads; modes of torch do not reach the hooks of a backward.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_METHODS = (
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"),
    *("equal", "allclose", "unique", "masked_select", "is_nonzero", "__contains__"),
)
_FUNCTIONS = ("nonzero", "equal", "allclose", "unique", "masked_select", "is_nonzero")


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield the names of the reads inside the block."""
    seen: list[str] = []
    places = [*((torch.Tensor, name) for name in _METHODS), *((torch, name) for name in _FUNCTIONS)]
    originals = [(owner, name, vars(owner).get(name)) for owner, name in places]
    for owner, name, _ in originals:
        setattr(owner, name, _counted(getattr(owner, name), name, seen))
    try:
        yield seen
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _counted(function: Any, name: str, seen: list[str]) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return function(*args, **kwargs)

    return counted
