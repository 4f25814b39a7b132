"""Linear combinations of byte strings over the field of 256 elements, compiled or with torch.

The compiled one (`_core/erasure.c`) needs a pass over the inputs. Without it, torch adds 64-bit words of eight elements
each. A product with a constant is then a sum over the bits of the constant, from the highest to the lowest, with a
multiplication by x of all eight elements between two bits.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ddp.elastic.erasure_code import Row

_PIECE = 256 << 10  # bytes that torch combines at once, so that they stay in the cache
_LOW_BITS = 0x0101010101010101
_REDUCED = 0x1D
WORD = 8  # the lengths of all buffers are multiples of it


@functools.cache
def compiled() -> ModuleType | None:
    if os.environ.get("DDP_NATIVE", "1") == "0":
        return None
    try:
        return import_module("ddp.elastic._erasure")
    except ImportError:
        return None


def combine(rows: Sequence[Row], inputs: Sequence[memoryview], outputs: Sequence[memoryview]) -> None:
    """Write to each output the combination of the inputs with the coefficients of its row."""
    if not len(outputs[0]):
        return
    if (native := compiled()) is not None:
        native.combine(bytes(each for row in rows for each in row), tuple(inputs), tuple(outputs))
    else:
        combine_with_torch(rows, inputs, outputs)


def combine_with_torch(
    rows: Sequence[Row], inputs: Sequence[memoryview], outputs: Sequence[memoryview]
) -> None:
    sources = [torch.frombuffer(each, dtype=torch.int64) for each in inputs]
    for row, output in zip(rows, outputs, strict=True):
        pieces = [torch.split(each, _PIECE // WORD) for each in sources]
        results = torch.split(torch.frombuffer(output, dtype=torch.int64), _PIECE // WORD)
        for number, result in enumerate(results):
            _combine_piece(row, [each[number] for each in pieces], result)


def _combine_piece(row: Row, inputs: list[torch.Tensor], result: torch.Tensor) -> None:
    result.zero_()
    for bit in reversed(range(max(row).bit_length())):
        _times_x(result)
        for coefficient, each in zip(row, inputs, strict=True):
            if coefficient >> bit & 1:
                result ^= each


def _times_x(words: torch.Tensor) -> None:
    """Multiply all elements by x, in place."""
    over = (words >> 7) & _LOW_BITS
    words &= _LOW_BITS * 0x7F
    words <<= 1
    words ^= over * _REDUCED
