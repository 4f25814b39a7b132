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
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = 624
_PYTHONS = struct.Struct(f"=i{_WORDS}I")  # the index, then the words
_POSITION = struct.Struct("=i")  # NumPy's, after the words
_NUMPYS_SIZE = 4 * _WORDS + _POSITION.size


class PythonGenerator:
    """The generator behind the functions of the module `random`."""

    def __init__(self) -> None:
        self._source: Any = None
        self._address = 0

    def hold(self) -> Callable[[], None]:
        """Return a function that sets it back to where it is now."""
        source: Any = getattr(random.getstate, "__self__", None)
        if source is not self._source:
            self._source, self._address = source, _block_of(source)
        if not self._address:
            return partial(random.setstate, random.getstate())
        return partial(_set_python, source, ctypes.string_at(self._address, _PYTHONS.size), source.gauss_next)


def _block_of(source: Any) -> int:
    """The address of the block; 0 if it is not known."""
    if type(source) is not random.Random or sys.implementation.name != "cpython":
        return 0
    numbers = source.getstate()[1]
    block = _PYTHONS.pack(numbers[_WORDS], *numbers[:_WORDS])
    at = ctypes.string_at(id(source), type(source).__basicsize__).find(block)
    return id(source) + at if at >= 0 else 0


def _set_python(source: random.Random, block: bytes, gauss: float | None) -> None:
    index, *words = _PYTHONS.unpack(block)
    source.setstate((source.VERSION, (*words, index), gauss))


class NumpyGenerator:
    """NumPy's global generator. The library is asked again only if numbers were drawn since.

    The block does not contain the second number of a pair of normal ones that is still to be returned. If there is one,
    the library is asked each time. If there is none, to get one changes the block.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._address = 0
        self._block = b""
        self._state: Any = None

    def state(self, numpy: Any) -> Any:
        """The state that `numpy.random.get_state(legacy=False)` returns; not to be changed."""
        source: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
        known = source is not None and source is self._source
        if known and ctypes.string_at(self._address, _NUMPYS_SIZE) == self._block:
            return self._state
        state = numpy.get_state(legacy=False)
        self._source = None
        if type(source).__name__ == "MT19937" and not state["has_gauss"]:
            if not known:
                self._address = source.ctypes.state_address
            inner = state["state"]
            self._block = inner["key"].tobytes() + _POSITION.pack(inner["pos"])
            if ctypes.string_at(self._address, _NUMPYS_SIZE) == self._block:
                self._source, self._state = source, state
        return state
