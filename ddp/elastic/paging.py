"""What the kernel is told about pages of memory before they are used. Advice that it does not know has no effect."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_LARGE_PAGE = 2 << 20


def ask_for_large_pages(address: int, n_bytes: int) -> None:
    """A fault for each 4 KiB takes longer than what is written there."""
    begin = -(-address // _LARGE_PAGE) * _LARGE_PAGE
    whole = (address + n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if (advise := _madvise()) is not None and whole > 0:
        advise(begin, whole, _MADV_HUGEPAGE)


def map_now(buffer: memoryview) -> None:
    """Let the kernel map all pages of a writable buffer, which begins at a page. Other threads run meanwhile."""
    if (advise := _madvise()) is not None:
        advise(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer), _MADV_POPULATE_WRITE)


@functools.cache
def _madvise() -> Any:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
