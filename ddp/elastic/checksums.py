"""The CRC-32 of what commits hold, compiled where the processor has an instruction for it, otherwise with zlib.

Both give the same number: which of them has written a file does not matter. The compiled one is limited by the memory,
zlib by the processor.
"""

from __future__ import annotations

import functools
import os
import zlib
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_SHORT = 4096  # bytes for which zlib is as good


@functools.cache
def compiled() -> ModuleType | None:
    if os.environ.get("DDP_NATIVE", "1") == "0":
        return None
    try:
        native = import_module("ddp.elastic._checksum")
    except ImportError:
        return None
    return native if native.is_fast() else None


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """Return the checksum of data. `before`: the checksum of the bytes in front of it."""
    if len(data) < _SHORT or (native := compiled()) is None:
        return zlib.crc32(data, before)
    return int(native.crc32(data, before))
