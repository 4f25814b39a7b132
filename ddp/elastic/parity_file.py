"""The bytes of a parity chunk in memory.

    prologue | facts | space | data

The *facts* describe the whole stripe in JSON: the commit, whose images have chunks in it, and the checksum of each
chunk. So any parity chunk tells what a lost image was, and a damaged chunk is recognized. As in an image (`image`),
the writer clears the state word in the prologue first, and sets it last.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict
from typing import Any

from ddp.elastic.commits import CommitName
from ddp.elastic.image import DamagedImage
from ddp.elastic.recovery import Protected, StripeFacts

_MAGIC = b"ddppar01"
_PROLOGUE = struct.Struct(
    "<8s4sIIQQ"
)  # magic, state, checksum of the facts, their length, place and length of the data
_BLANK, _COMPLETE = b"none", b"memo"
_PAGE = 4096
_OF_A_CHUNK = 256  # bytes of facts, at most


def data_at(n_chunks: int) -> int:
    return -(-(_PROLOGUE.size + _OF_A_CHUNK * (n_chunks + 2)) // _PAGE) * _PAGE


def begin(buffer: memoryview) -> None:
    buffer[: _PROLOGUE.size] = _PROLOGUE.pack(_MAGIC, _BLANK, 0, 0, 0, 0)


def finish(buffer: memoryview, facts: dict[str, Any], n_bytes: int) -> None:
    """Complete a chunk whose data has been written. `facts`: of `facts_of`, with the row."""
    text = json.dumps(facts).encode()
    at = data_at(len(facts["sums"]))
    if _PROLOGUE.size + len(text) > at:
        raise OSError(f"{len(text)} bytes of facts do not fit")
    buffer[_PROLOGUE.size : _PROLOGUE.size + len(text)] = text
    buffer[: _PROLOGUE.size] = _PROLOGUE.pack(_MAGIC, _COMPLETE, zlib.crc32(text), len(text), at, n_bytes)


def facts_of(stripe: StripeFacts, row: int) -> dict[str, Any]:
    return {
        "number": stripe.commit.number,
        "lineage": stripe.commit.lineage,
        "stripe": stripe.number,
        "m": stripe.m,
        "row": row,
        "data": [None if each is None else asdict(each) for each in stripe.data],
        "sums": stripe.sums,
    }


class ParityFile:
    """A parity chunk in a buffer of the caller. The constructor checks the facts, not the data."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < _PROLOGUE.size:
            raise DamagedImage(f"too short: {len(buffer)} bytes")
        magic, state, checksum, length, at, n_bytes = _PROLOGUE.unpack(buffer[: _PROLOGUE.size])
        if magic != _MAGIC or state != _COMPLETE:
            raise DamagedImage("incomplete: its writer stopped before the end")
        text = bytes(buffer[_PROLOGUE.size : _PROLOGUE.size + length])
        if zlib.crc32(text) != checksum or at + n_bytes > len(buffer):
            raise DamagedImage("wrong checksum of the facts")
        found = json.loads(text)
        self.stripe = StripeFacts(
            CommitName(found["number"], found["lineage"]),
            found["stripe"],
            found["m"],
            tuple(None if each is None else Protected(**each) for each in found["data"]),
            tuple(found["sums"]),
        )
        self.row: int = found["row"]
        self.facts_sum: int = checksum
        self.data = buffer[at : at + n_bytes]
