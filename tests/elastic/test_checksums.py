"""The compiled checksum is the one of zlib, which other machines may use for the same file."""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING

import pytest

from ddp.elastic.images import image

if TYPE_CHECKING:
    from types import ModuleType


def compiled() -> ModuleType:
    native = image.compiled_checksums()
    if native is None:
        pytest.skip("this processor, or this installation, has only zlib")
    return native


def test_every_length_and_every_alignment() -> None:
    native, chance = compiled(), random.Random(1)
    data = memoryview(chance.randbytes(400))
    for length in range(300):
        for begin in (0, 1, 7, 8, 15, 63):
            piece, before = data[begin : begin + length], chance.getrandbits(32)
            assert native.crc32(piece, before) == zlib.crc32(piece, before), (length, begin)


def test_large_pieces_that_continue_each_other() -> None:
    native, data = compiled(), random.Random(2).randbytes(3_000_001)
    found = native.crc32(memoryview(data)[1_000_003:], native.crc32(memoryview(data)[:1_000_003], 0))
    assert found == zlib.crc32(data) == image.crc32(data)


def test_a_single_bit_anywhere_changes_it() -> None:
    native, data = compiled(), bytearray(4096)
    sums = {native.crc32(data, 0)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(native.crc32(data, 0))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * len(data)


def test_zlib_is_used_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "compiled_checksums", lambda: None)
    data = random.Random(3).randbytes(10_000)
    assert image.crc32(data, 5) == zlib.crc32(data, 5)


def test_what_is_not_bytes_is_refused() -> None:
    with pytest.raises(TypeError):
        compiled().crc32("text", 0)
