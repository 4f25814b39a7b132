"""The bytes of one part of a commit in memory. Files of release 0.1.0 have the same format.

    prologue | head | skeleton | private | layout | data

The *head* names the commit, the part and the rank in JSON. The *layout* describes the tensors and their offsets in the
data. It rarely changes between commits and is created once. *Private* is state of one rank (its random number
generators) that no other rank gets. The prologue has the lengths, a checksum of everything before the data, a checksum
of the data, and a state word that marks a complete image.

In memory, the only danger is that the writer dies. It may stop anywhere, but everything it has stored remains. So the
writer clears the state word first and sets it last, and the data needs no checksum. A file can be damaged in other
ways, so the checksum of the data is verified for files. Today's files on disk are described in `part_file`.
"""

from __future__ import annotations

import functools
import io
import json
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from ddp.elastic.commits import CommitName
from ddp.elastic.images import leaves
from ddp.elastic.images.leaves import Leaf
from ddp.groups import core_loading
from ddp.telemetry.coded import CodedError

# --- checksums -------------------------------------------------------------------------------------
#
# The CRC-32 of what commits hold, compiled where the processor has an instruction for it, otherwise with zlib.
#
# Both give the same number: which of them has written a file does not matter. The compiled one is limited by the
# memory, zlib by the processor.

_SHORT = 4096  # bytes for which zlib is as good


@functools.cache
def compiled_checksums() -> ModuleType | None:
    native = core_loading.part("ddp.elastic._checksum")
    return native if native is not None and native.is_fast() else None


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """Return the checksum of data. `before`: the checksum of the bytes in front of it."""
    if len(data) < _SHORT or (native := compiled_checksums()) is None:
        return zlib.crc32(data, before)
    return int(native.crc32(data, before))


# --- the image -------------------------------------------------------------------------------------

_MAGIC = b"ddpimg01"
_PROLOGUE = struct.Struct(
    "<8s4sIIQQQQQQ"
)  # magic, state, index checksum, data checksum, five lengths, data's place
_BLANK, _IN_MEMORY, _ON_DISK = b"none", b"memo", b"disk"
_ALIGN = 64
_PAGE = 4096
_PIECE = 8 << 20  # the bytes that are read at once


class DamagedImage(CodedError):
    """An image that cannot be used; the text gives the reason."""

    code = "DDP-8004"


@dataclass(frozen=True, slots=True)
class ImageHead:
    number: int
    lineage: str
    part: int | None  # None: only the private state
    parts: int
    rank: int
    world_size: int
    regions: int  # fingerprint of the regions of the modules' tensors in this image
    live: bool = False  # a survivor wrote it after a failure


_RENAMED = {"era": "lineage"}  # fields in files of earlier versions


def head_of(data: bytes) -> ImageHead:
    return ImageHead(**{_RENAMED.get(name, name): value for name, value in json.loads(data).items()})


@dataclass(frozen=True, slots=True)
class ImageLayout:
    leaves: tuple[Leaf, ...]
    offsets: tuple[int, ...]  # -1: the tensor is described, but not stored in this image
    n_bytes: int

    @classmethod
    def of(cls, leaves: list[Leaf], kept: list[bool]) -> ImageLayout:
        offsets, end = [], 0
        for leaf, is_kept in zip(leaves, kept, strict=True):
            offsets.append(end if is_kept else -1)
            if is_kept:
                end += -(-leaf.n_bytes // _ALIGN) * _ALIGN
        return cls(tuple(leaves), tuple(offsets), end)

    def pack(self) -> bytes:
        rows = [
            [leaf.path, str(leaf.dtype), leaf.shape, leaf.stride, leaf.region, leaf.sharded, offset]
            for leaf, offset in zip(self.leaves, self.offsets, strict=True)
        ]
        return json.dumps([self.n_bytes, rows]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> ImageLayout:
        n_bytes, rows = json.loads(data)
        leaves = tuple(
            Leaf(
                path, dtype_of(dtype), tuple(shape), tuple(stride), tuple((a, b) for a, b in region), sharded
            )
            for path, dtype, shape, stride, region, sharded, _offset in rows
        )
        return cls(leaves, tuple(row[-1] for row in rows), n_bytes)


def dtype_of(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise DamagedImage(f"unknown dtype {text}")
    return dtype


def serialize(value: Any) -> bytes:
    buffer = io.BytesIO()
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # the script may have switched them off for its own files
    try:
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(has_checksums)
    return buffer.getvalue()


def read_plain(data: bytes | memoryview) -> Any:
    """Return what was saved; raise if it holds more than plain values, because reading must not execute code in it."""
    with warnings.catch_warnings():
        # From 2.12 on, torch warns that it does not check sparse tensors here, or that it does and this takes time.
        warnings.filterwarnings("ignore", "(Sparse invariant checks are|Validating sparse tensor invariants)")
        return torch.load(io.BytesIO(data), weights_only=True)


# --- writing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageIndex:
    """Everything but the data, ready to be written."""

    sections: tuple[bytes, bytes, bytes, bytes]
    data_bytes: int

    @property
    def data_at(self) -> int:
        end = _PROLOGUE.size + sum(map(len, self.sections))
        # Leave space, so that the data does not move when a number gets one more digit.
        return -(-(end + _PAGE // 2) // _PAGE) * _PAGE

    @property
    def n_bytes(self) -> int:
        return self.data_at + self.data_bytes


def index_of(head: ImageHead, skeleton: bytes, private: bytes, layout: bytes, data_bytes: int) -> ImageIndex:
    fields = {name: getattr(head, name) for name in ImageHead.__slots__}
    return ImageIndex((json.dumps(fields).encode(), skeleton, private, layout), data_bytes)


def begin(buffer: memoryview) -> None:
    buffer[: _PROLOGUE.size] = _prologue(_BLANK, 0, 0, (0, 0, 0, 0), 0, 0)


def finish(buffer: memoryview, index: ImageIndex) -> None:
    """Complete an image whose data has been copied to its place."""
    text = b"".join(index.sections)
    buffer[_PROLOGUE.size : _PROLOGUE.size + len(text)] = text
    lengths = tuple(map(len, index.sections))
    buffer[: _PROLOGUE.size] = _prologue(
        _IN_MEMORY, zlib.crc32(text), 0, lengths, index.data_bytes, index.data_at
    )


def _prologue(
    state: bytes, index_sum: int, data_sum: int, lengths: tuple[int, ...], data_bytes: int, data_at: int
) -> bytes:
    return _PROLOGUE.pack(_MAGIC, state, index_sum, data_sum, *lengths, data_bytes, data_at)


# --- reading -----------------------------------------------------------------------------------------


def is_image(buffer: memoryview) -> bool:
    return bytes(buffer[: len(_MAGIC)]) == _MAGIC


class Image:
    """An image in a buffer of the caller. The constructor checks the index, not the data."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < _PROLOGUE.size:
            raise DamagedImage(f"too short: {len(buffer)} bytes")
        magic, state, index_sum, self.data_sum, *lengths, data_bytes, data_at = _PROLOGUE.unpack(
            buffer[: _PROLOGUE.size]
        )
        if magic != _MAGIC or state == _BLANK:
            raise DamagedImage(
                "incomplete: its writer stopped before the end" if magic == _MAGIC else "not a commit file"
            )
        self.on_disk = state == _ON_DISK
        end = _PROLOGUE.size + sum(lengths)
        if end > data_at or data_at + data_bytes > len(buffer):
            raise DamagedImage(f"truncated: {len(buffer)} of {data_at + data_bytes} bytes")
        if zlib.crc32(buffer[_PROLOGUE.size : end]) != index_sum:
            raise DamagedImage("wrong checksum of the index")
        sections, at = [], _PROLOGUE.size
        for length in lengths:
            sections.append(buffer[at : at + length])
            at += length
        self._head, self._skeleton, self._private, self._layout = sections
        self.data = buffer[data_at : data_at + data_bytes]
        self.whole = buffer[: data_at + data_bytes]
        self.index_sum: int = index_sum
        self.head = head_of(bytes(self._head))

    @cached_property
    def layout(self) -> ImageLayout:
        return ImageLayout.unpack(bytes(self._layout))

    @property
    def commit(self) -> CommitName:
        return CommitName(self.head.number, self.head.lineage)

    def sections(self) -> tuple[memoryview, memoryview, memoryview]:
        """Head, skeleton and private state as they are stored."""
        return self._head, self._skeleton, self._private

    def skeleton(self) -> Any:
        outer = _deserialize(self._skeleton)
        return outer | {"objects": _deserialize(memoryview(outer["objects"]))}

    def private(self) -> Any:
        """What belongs to the rank that wrote the image. Tensors may be views of the image."""
        return leaves.assemble(_deserialize(self._private), self.tensor)

    def content_sum(self) -> int:
        """A checksum of the tensors and their descriptions, which all replicas share, in memory and in files."""
        described = [
            (leaf.path, str(leaf.dtype), leaf.shape, leaf.stride, leaf.region, leaf.sharded)
            for leaf in self.layout.leaves
            if not leaf.is_own
        ]
        pairs = zip(self.layout.leaves, self.leaf_sums(), strict=True)
        return zlib.crc32(repr((described, [crc for leaf, crc in pairs if not leaf.is_own])).encode())

    def leaf_sums(self) -> list[int]:
        """The checksum of each tensor; 0 if it is not stored in the image."""
        return [self.leaf_sum(number) for number in range(len(self.layout.leaves))]

    def leaf_sum(self, number: int) -> int:
        leaf, at = self.layout.leaves[number], self.layout.offsets[number]
        return 0 if at < 0 else data_checksum(self.data[at : at + leaf.n_bytes])

    def check_data(self) -> None:
        if self.on_disk and data_checksum(self.data) != self.data_sum:
            raise DamagedImage("wrong checksum of the data")

    def tensor(self, number: int) -> torch.Tensor | None:
        """A view of the image's bytes; None if this leaf is not stored in the image."""
        leaf, offset = self.layout.leaves[number], self.layout.offsets[number]
        if offset < 0:
            return None
        return view(self.data, leaf, offset)


def view(data: memoryview, leaf: Leaf, offset: int) -> torch.Tensor:
    if not leaf.n_bytes:
        return torch.empty(leaf.local_shape, dtype=leaf.dtype)
    return part(torch.frombuffer(data, dtype=torch.uint8), leaf, offset)


def part(data: torch.Tensor, leaf: Leaf, offset: int) -> torch.Tensor:
    """A leaf as a view of bytes, on whatever device they are."""
    return data[offset : offset + leaf.n_bytes].view(leaf.dtype).view(leaf.local_shape)


def _deserialize(section: memoryview) -> Any:
    return read_plain(section)


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Split data into pieces that are small enough to let other threads run in between."""
    return (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))


def data_checksum(data: memoryview, before: int = 0) -> int:
    """Return the checksum of data. `before`: the checksum of the bytes in front of it."""
    result = before
    for piece in pieces(data):
        result = crc32(piece, result)
    return result
