"""Holds the states of Python's and NumPy's random generators, at a fraction of the time that these take to return them.

Both are Mersenne Twisters. The libraries return the state of 624 words as numbers that they make one by one: Python in
10 us, NumPy in 100 us. Both objects keep the words in one block of memory, which is copied in less than 1 us. Where the
block is depends on the release, so it is accepted only if it has the same contents as the state that the library
returns. Otherwise, and for other kinds of generators, the library is asked each time.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

_WORDS = 624
_PYTHONS = struct.Struct(f"=i{_WORDS}I")  # the index, then the words
_POSITION = struct.Struct("=i")  # NumPy's, after the words


class PythonGenerator:
    """The generator behind the functions of the module `random`."""

    def __init__(self) -> None:
        self._source: Any = None
        self._block: Any = None  # the memory

    def state(self) -> Any:
        """What `set` brings back."""
        source: Any = getattr(random.getstate, "__self__", None)
        if source is not self._source:
            self._source, self._block = source, _block_of(source)
        return random.getstate() if self._block is None else (source, self._block.raw, source.gauss_next)

    def set(self, state: Any) -> None:
        source, block, gauss = state
        if not isinstance(source, random.Random):
            random.setstate(state)
            return
        index, *words = _PYTHONS.unpack(block)
        source.setstate((source.VERSION, (*words, index), gauss))


def _block_of(source: Any) -> Any:
    """The memory of the block; None if it is not known."""
    if type(source) is not random.Random or sys.implementation.name != "cpython":
        return None
    numbers = source.getstate()[1]
    block = _PYTHONS.pack(numbers[_WORDS], *numbers[:_WORDS])
    at = ctypes.string_at(id(source), type(source).__basicsize__).find(block)
    return _memory(id(source) + at, _PYTHONS.size) if at >= 0 else None


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


class NumpyGenerator:
    """NumPy's global generator. The library is asked again only if numbers were drawn since.

    The block does not contain the second number of a pair of normal ones that is still to be returned. If there is one,
    the library is asked each time. If there is none, to get one changes the block.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._block: Any = None  # the memory
        self._bytes = b""
        self._state: Any = None

    def state(self, numpy: Any) -> Any:
        """The state that `numpy.random.get_state(legacy=False)` returns; not to be changed."""
        source: Any = getattr(numpy, "get_bit_generator", _nothing)()
        if source is not None and source is self._source and self._block.raw == self._bytes:
            return self._state
        state = numpy.get_state(legacy=False)
        self._source = None
        if type(source).__name__ == "MT19937" and not state["has_gauss"]:
            inner = state["state"]
            self._bytes = inner["key"].tobytes() + _POSITION.pack(inner["pos"])
            self._block = _memory(source.ctypes.state_address, len(self._bytes))
            if self._block.raw == self._bytes:
                self._source, self._state = source, state
        return state


def _nothing() -> None:
    """An old NumPy has no such function."""
